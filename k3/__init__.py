"""OpenK3: train, post-train and serve models built like Kimi K3.

Importing this package loads no heavy library.
"""

__version__ = "0.1.0"


class UserError(ValueError):
    """A mistake of the user's: one line that names the file, the field and both values. The
    command line exits with 2.
    """
