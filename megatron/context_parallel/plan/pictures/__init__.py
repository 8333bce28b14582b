"""Pictures of plans: images, and an interactive page.

In: a plan and its trace. Out: a PNG with the assignment matrix and a lane for each rank (`draw.py`), or one HTML file
that plays the plan (`page.py`). Start with `lanes.py`: what a picture shows, as data.
"""
