;; Grows a table for ever.
(module
  (import "wasi_snapshot_preview1" "proc_exit" (func $exit (param i32)))
  (memory (export "memory") 1)
  (table $t 1 funcref)
  (func $_start (export "_start")
    (loop $l
      (if (i32.eq (table.grow $t (ref.null func) (i32.const 10000000)) (i32.const -1)) (then (call $exit (i32.const 9))))
      (br $l))))
