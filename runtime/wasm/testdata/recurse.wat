;; Calls itself for ever, without a loop.
(module
  (memory (export "memory") 1)
  (func $down (param i32) (result i32) (i32.add (i32.const 1) (call $down (i32.add (local.get 0) (i32.const 1)))))
  (func $_start (export "_start") (drop (call $down (i32.const 0)))))
