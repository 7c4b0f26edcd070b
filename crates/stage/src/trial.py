# Prints `lacks NAME` for each Python module that the sources in the directories argv[1:] import and this Python does not have,
# `fails NAME: ERROR` for one that it has and can't import, and `version X.Y`. The sources themselves are not imported:
# their libraries may still be those of another environment.
import os
import pathlib
import re
import sys

# A Flux may bring them along.
sys.path[:0] = [os.path.dirname(directory) for directory in sys.argv[1:]]
print("version %d.%d" % sys.version_info[:2])
sources = [path.read_text(errors="replace") for directory in sys.argv[1:] for path in pathlib.Path(directory).rglob("*.py")]
for name in ("cffi", "ply", "yaml"):
    # Nothing imports cffi by name: the modules that it has compiled import its backend.
    pattern = re.compile(r"^\s*(from|import) %s\b" % ("_flux" if name == "cffi" else name), re.MULTILINE)
    module = "_cffi_backend" if name == "cffi" else name
    if any(pattern.search(source) for source in sources):
        try:
            __import__(module)
        except ModuleNotFoundError as error:
            print("lacks" if error.name == module else "fails", name)
        except ImportError as error:
            print("fails %s: %s" % (name, error))
