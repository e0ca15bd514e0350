;; Prints a line, then sleeps for an hour in one poll_oneoff.
(module
  (import "wasi_snapshot_preview1" "fd_write" (func $write (param i32 i32 i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "poll_oneoff" (func $poll (param i32 i32 i32 i32) (result i32)))
  (memory (export "memory") 1)
  (data (i32.const 0) "\08\00\00\00\09\00\00\00sleeping\n")
  (func $_start (export "_start")
    (drop (call $write (i32.const 1) (i32.const 0) (i32.const 1) (i32.const 64)))
    (i32.store (i32.const 144) (i32.const 1))
    (i64.store (i32.const 152) (i64.const 3600000000000))
    (drop (call $poll (i32.const 128) (i32.const 256) (i32.const 1) (i32.const 64)))))
