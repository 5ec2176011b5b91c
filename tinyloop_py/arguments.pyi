# Nothing for Python: int_argument and real_argument serve other extension modules.
