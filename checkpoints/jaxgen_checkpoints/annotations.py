"""Reading a class body's annotations, also when they are postponed strings, at class definition."""

import inspect
import sys

from jaxgen_checkpoints.errors import MappingError


def own_annotations(cls: type) -> dict[str, object]:
    """Evaluate the annotations written in the body of `cls` itself.

    To be called from `__init_subclass__`. Strings are looked up in the module of `cls` and in the
    frame that defines it, so that classes made inside a function work too. Raises `MappingError`
    for a name that neither knows.
    """
    # Frame 0 is this function, 1 __init_subclass__, 2 whoever executes the class statement.
    names = sys._getframe(2).f_locals
    try:
        return inspect.get_annotations(cls, locals=names, eval_str=True)
    except NameError as error:
        raise MappingError(
            f"{cls.__name__}: an annotation cannot be evaluated ({error}); "
            "import or define the name before the class"
        ) from error
