# Nothing for Python: int_argument serves other extension modules.
