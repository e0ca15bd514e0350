;; Its start function, which runs while it is instantiated, traps.
(module
  (memory (export "memory") 1)
  (func $begin (unreachable))
  (start $begin)
  (func (export "_start")))
