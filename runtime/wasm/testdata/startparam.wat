;; Its entry point wants a parameter that nobody has.
(module
  (memory (export "memory") 1)
  (func (export "_start") (param i32)))
