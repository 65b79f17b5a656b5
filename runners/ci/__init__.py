"""What the sweep workflow's steps run: plan, run, collect, commit.

The workflow moves opaque JSON between its jobs; everything that it says is made and read here. plan.json is what shall
be measured, one `Batch` a sweep job; collected.json is what came of it; the changelog gets the rest.
"""
