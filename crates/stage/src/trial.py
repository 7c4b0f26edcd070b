# Imports what rc1 and `flux submit` import from the directory argv[1], and prints each module that this Python lacks for it.
import sys

sys.path.insert(0, sys.argv[1])
try:
    import flux.modprobe, flux.cli.submit
except ImportError as error:
    # The first failed import hides the others.
    lacking = [error.name]
    for name in ("_cffi_backend", "ply", "yaml"):
        try:
            __import__(name)
        except ImportError:
            lacking.append(name)
    for name in set(lacking):
        print("lacks", name)
    if lacking[0] is None or lacking[0].partition(".")[0] in ("flux", "_flux"):
        print("fails", error)
