from typing_extensions import disjoint_base

from .plan import Plan

@disjoint_base
class Runner:
    def __init__(self, plan: Plan) -> None: ...
    @property
    def plan(self) -> Plan: ...
    def close(self) -> None: ...

@disjoint_base
class Stepper:
    @property
    def n_ahead(self) -> int: ...
    @property
    def error(self) -> Exception | None: ...
