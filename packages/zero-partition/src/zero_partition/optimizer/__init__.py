"""Any torch optimizer over shards, without knowing which it is.

An optimizer that looks at single elements may step any cut of a parameter. Others need rows, whole
tensors, or all of a parameter group. needs.py finds out by trials on small tensors, under a watch
over the operators (watch.py) that sees which elements a step combines. shards.py divides state that
is there with its parameters, and puts it together again.

What must never happen: an optimizer that combines elements is given a cut through them in silence.
"""
