"""The exceptions that tinyloop adds to Python's own."""


class FormatError(ValueError):
    """A `.tinyloop` file (or a model to convert) is damaged, incomplete or of another kind.

    The text names the tensor or field, what was got and what was expected.
    """


class OutOfMemoryError(RuntimeError):
    """Memory or the model's `kv_budget` does not suffice; nothing already held was lost.

    The text begins with ``out of memory`` and says what was asked for and what is free.
    """


class PoolFullError(RuntimeError):
    """A prefix does not fit its pool: it exceeds the pool's budgets, or only pinned entries are left to evict."""


class BackendError(RuntimeError):
    """A native library or a device's driver failed at something else than memory. Callers know it as the RuntimeError that it is."""
