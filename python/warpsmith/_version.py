from warpsmith import _C

__version__: str = _C.build()["version"]
