CANONICAL: dict[int, tuple[str, int]]
