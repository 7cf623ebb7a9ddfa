"""Puts numbers into words."""


def count(many: int, noun: str) -> str:
    """Returns a number and its noun as text, such as "1 image" or "1,200 images"."""
    plural = "es" if noun.endswith("s") else "s"
    return f"{many:,} {noun}{'' if many == 1 else plural}"
