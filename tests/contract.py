"""include/tinyloop.h as Python sees it: constants, structs and functions read from the header's text, so that none can drift."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
HEADER = ROOT / "include" / "tinyloop.h"

_SCALARS = {
    "int32_t": ctypes.c_int32, "uint32_t": ctypes.c_uint32, "int64_t": ctypes.c_int64, "uint64_t": ctypes.c_uint64,
    "float": ctypes.c_float, "double": ctypes.c_double, "char": ctypes.c_char, "tl_status": ctypes.c_int32,
}  # fmt: skip


def _code() -> str:
    text = re.sub(r"/\*.*?\*/", " ", HEADER.read_text(), flags=re.S)
    return re.sub(r"\s+", " ", re.sub(r"\\\n", " ", text))


@dataclass(frozen=True)
class Function:
    """One export: its result and (type text, name) of each parameter."""

    name: str
    result: str
    parameters: tuple[tuple[str, str], ...]

    def pointers(self) -> list[int]:
        """Positions of the parameters that are pointers and not the stream."""
        return [i for i, (kind, name) in enumerate(self.parameters) if "*" in kind and name != "stream"]


def _declare(text: str, structs: dict[str, Any]) -> list[tuple[str, Any]]:
    """(name, ctypes type) of every variable of a declaration such as "const float *a, *b[3]"."""
    head = re.match(r"\s*(?:const\s+)?(\w+)\s*(.*)", text)
    assert head, text
    fields = []
    for item in head[2].split(","):
        stars, name, length = re.fullmatch(r"\s*([*\s]*(?:const\s*\**)?)\s*(\w+)\s*(?:\[(\d+)\])?\s*", item).groups()  # type: ignore[union-attr]
        kind = ctypes.c_void_p if "*" in stars else _SCALARS.get(head[1]) or structs[head[1]]
        fields.append((name, kind * int(length) if length else kind))
    return fields


def read_structs() -> dict[str, type[ctypes.Structure]]:
    """Name -> ctypes structure of every struct that the header defines."""
    structs: dict[str, type[ctypes.Structure]] = {}
    for name, body in re.findall(r"typedef struct (\w+) \{(.*?)\} \1;", _code()):
        fields = [field for line in body.split(";") if line.strip() for field in _declare(line, structs)]
        structs[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
    return structs


def read_functions() -> dict[str, Function]:
    """Name -> declaration of every export."""
    functions = {}
    for result, name, arguments in re.findall(r"TL_API ([\w ]+?\*?) ?(tl_\w+)\(([^)]*)\);", _code()):
        pairs = [re.fullmatch(r"\s*(.*?)(\w+)\s*", a).groups() for a in arguments.split(",") if a.strip() != "void"]  # type: ignore[union-attr]
        functions[name] = Function(name, result.strip(), tuple((kind.strip(), parameter) for kind, parameter in pairs))
    return functions


def read_constants() -> dict[str, int]:
    """Name -> value of every macro and enumerator that is a plain number."""
    text = HEADER.read_text()
    found = re.findall(r"#define (TL_\w+) +(\d+)u?\b", text) + re.findall(r"\b(TL_\w+) = (\d+)", text)
    return {name: int(value) for name, value in found}


STRUCTS = read_structs()
FUNCTIONS = read_functions()
CONSTANTS = read_constants()


def load(path: Path) -> ctypes.CDLL:
    """A library whose functions are typed as the header declares them."""
    library = ctypes.CDLL(str(path))
    for function in FUNCTIONS.values():
        entry = getattr(library, function.name)
        entry.restype = ctypes.c_char_p if "*" in function.result else _SCALARS[function.result]
        entry.argtypes = [ctypes.c_void_p if "*" in kind else _SCALARS[kind.removeprefix("const ")] for kind, _ in function.parameters]
    return library


def struct(struct_name: str, **fields: Any) -> Any:
    """A struct with its size set; NumPy arrays stand for their addresses and are kept alive by it."""
    value = STRUCTS[struct_name]()
    value.size = ctypes.sizeof(value)
    value.kept = fields
    for name, field in fields.items():
        if isinstance(getattr(value, name), ctypes.Array):
            for i, item in enumerate(field):
                getattr(value, name)[i] = _plain(item)
        else:
            setattr(value, name, _plain(field))
    return value


def _plain(value: Any) -> Any:
    """What ctypes takes: an array's address, a structure or number as it is."""
    if hasattr(value, "ctypes"):
        return value.ctypes.data
    if isinstance(value, ctypes.Array):
        return ctypes.addressof(value)
    return value
