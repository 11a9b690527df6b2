"""DeepSpeed's configuration file: a row for each key, and what the keys of a file say.

`file_key.py` has what a row is: a path, the kind of its values, and what becomes of it. `keys.py`
is the table. `settings.py` reads a file into one `Setting` for each row, resolves "auto", warns of
what changes nothing, and makes the arguments of ZeroConfig. No key has a branch of its own but
where two contradict each other.
"""
