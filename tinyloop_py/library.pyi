from os import PathLike
from typing import Final

from typing_extensions import Self, disjoint_base

EXPORTS: Final[tuple[str, ...]]

@disjoint_base
class Library:
    def __new__(cls, path: str | PathLike[str]) -> Self: ...
    @property
    def path(self) -> str: ...
    def usable_cpus(self) -> int: ...
