"""One file per architecture or backend; installed, and only importable, as ``probelens.adapters``.

The name ``adapters`` on PyPI belongs to another project. Importing this folder under that name, which
happens when the root of the repository is on ``sys.path``, would hide it, so it is refused.
"""

if __name__ == "adapters":
    raise ModuleNotFoundError(
        "this folder is a part of probelens, not the package 'adapters' of PyPI: "
        "import probelens.adapters, or take the root of the probelens repository off sys.path",
        name="adapters",
    )
