"""Modules that are there for a while."""
import sys
from contextlib import contextmanager


@contextmanager
def installed(modules):
    """Let `import` find these modules.

    (mock.patch.dict would forget modules that are imported meanwhile, and some cannot be imported twice.)
    """
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
