"""schemathesis over the server's OpenAPI description: whatever the description allows, or nearly allows, is answered as it says."""

import pytest

schemathesis = pytest.importorskip("schemathesis")
for package in ("fastapi", "uvicorn", "httptools", "jinja2", "prometheus_client"):
    pytest.importorskip(package)

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import integers
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance, status_code_conformance
from serving import NAME, ask, server_here

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


def test_every_route_answers_as_described():
    with server_here(auto_prefix=1000, max_seq_len=128, deadline=20.0) as (url, _):
        description = schemathesis.openapi.from_url(url + "/openapi.json")
        operations = [found.ok() for found in description.get_all_operations()]
        paths = {operation.path for operation in operations}
        assert paths >= {"/v1/chat/completions", "/v1/completions", "/v1/prefixes", "/v1/prefixes/{prefix_id}", "/tokenize", "/detokenize", "/health"}
        statuses: set[int] = set()
        for operation in operations:
            probe(operation, statuses)
        assert {200, 400, 404} <= statuses
        assert ask(url, "/health").status == 200


def probe(operation, statuses: set[int]) -> None:
    """Ask an operation what its description allows, with the model's name put right in most cases."""

    @settings(max_examples=15, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck), database=None)
    @given(case=operation.as_strategy(), right_name=integers(0, 4))
    def check(case, right_name):
        if isinstance(case.body, dict) and "model" in case.body and right_name:
            case.body["model"] = NAME
        statuses.add(case.call_and_validate(checks=CHECKS, timeout=60).status_code)

    check()
