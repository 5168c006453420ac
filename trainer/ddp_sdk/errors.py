"""Mistakes that the user can fix."""


class UserError(ValueError):
    """A mistake in the configuration or the data, which a restart can't fix.

    Its text is ``<field>: <problem>; <remedy>``. The bundled trainer prints it once, on rank 0, without a traceback,
    and every rank exits with ``EXIT_USER_ERROR``.
    """

    def __init__(self, field: str, problem: str, remedy: str) -> None:
        super().__init__(f"{field}: {problem}; {remedy}")
        self.field = field
        self.problem = problem
        self.remedy = remedy


def require(condition: bool, field: str, problem: str, remedy: str) -> None:
    """Raise a :class:`UserError` unless ``condition`` holds."""
    if not condition:
        raise UserError(field, problem, remedy)
