"""Texts of values that several commands show."""


def format_estimate(seconds: float) -> str:
    """Return an estimated duration as text, without more digits than an estimate has: 1m, 40m, 3h, 2d."""
    minutes = max(1, round(seconds / 60))
    if minutes < 100:
        return f"{minutes}m"
    return f"{round(minutes / 60)}h" if minutes < 48 * 60 else f"{round(minutes / 1440)}d"
