;; Prints a dot line every 20 ms, for ever: the healthy neighbour.
(module
  (import "wasi_snapshot_preview1" "fd_write" (func $write (param i32 i32 i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "poll_oneoff" (func $poll (param i32 i32 i32 i32) (result i32)))
  (memory (export "memory") 1)
  (data (i32.const 0) "\08\00\00\00\05\00\00\00tick\n")
  (func $_start (export "_start")
    (i32.store (i32.const 144) (i32.const 1))
    (i64.store (i32.const 152) (i64.const 20000000))
    (loop $l
      (drop (call $write (i32.const 1) (i32.const 0) (i32.const 1) (i32.const 64)))
      (drop (call $poll (i32.const 128) (i32.const 256) (i32.const 1) (i32.const 64)))
      (br $l))))
