"""Models that are built in parts, before anything is known of their training.

Inside `Init` (context.py) each parameter is cut as soon as its module has made it, so that no rank
ever has the whole model. early_shard.py is such a part: an equal share by rank, which `partition`
exchanges later for the part that the unit's layout asks for. materialize.py gives models on the
meta device memory and values. units.py plans which parameters are one unit, for both ways in.

What must never happen: random numbers are drawn in another order than without `Init`, or a rank has
two whole modules at a time.
"""
