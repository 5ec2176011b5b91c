from types import TracebackType
from typing import final

@final
class StepLock:
    def __enter__(self) -> None: ...
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...
