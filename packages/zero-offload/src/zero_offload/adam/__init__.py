"""Adam, Adagrad and Lion over tensors in host memory: one native pass, or the same in torch."""
