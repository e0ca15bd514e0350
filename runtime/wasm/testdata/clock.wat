;; Writes wall clock, monotonic clock, the monotonic clock after a sleep of
;; 50 ms, and 16 random bytes, as 40 raw bytes.
(module
  (import "wasi_snapshot_preview1" "clock_time_get" (func $now (param i32 i64 i32) (result i32)))
  (import "wasi_snapshot_preview1" "random_get" (func $random (param i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "poll_oneoff" (func $poll (param i32 i32 i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "fd_write" (func $write (param i32 i32 i32 i32) (result i32)))
  (memory (export "memory") 1)
  (data (i32.const 0) "\00\02\00\00\28\00\00\00")
  (func $_start (export "_start")
    (drop (call $now (i32.const 0) (i64.const 1) (i32.const 512)))
    (drop (call $now (i32.const 1) (i64.const 1) (i32.const 520)))
    (i32.store (i32.const 144) (i32.const 1))
    (i64.store (i32.const 152) (i64.const 50000000))
    (drop (call $poll (i32.const 128) (i32.const 256) (i32.const 1) (i32.const 64)))
    (drop (call $now (i32.const 1) (i64.const 1) (i32.const 528)))
    (drop (call $random (i32.const 536) (i32.const 16)))
    (drop (call $write (i32.const 1) (i32.const 0) (i32.const 1) (i32.const 64)))))
