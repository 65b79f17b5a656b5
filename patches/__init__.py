"""Changes to third-party engines: patches/<engine>/<name>/patch.yaml and patch.diff, see runners/patches.py.

There are none: engines run as shipped. A patch needs docs/waiver/<name>.md (what, why, upstream link, removal plan).
"""
