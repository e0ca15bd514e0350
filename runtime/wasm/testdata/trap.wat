;; Reads past its memory, two calls deep.
(module
  (memory (export "memory") 1)
  (func $read_sample (param i32) (result i32) (i32.load (local.get 0)))
  (func $handle_request (result i32) (call $read_sample (i32.const 0x7fffffff)))
  (func $_start (export "_start") (drop (call $handle_request))))
