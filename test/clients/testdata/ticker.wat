;; Writes "tick" every half second, for log tests.
(module
  (import "wasi_snapshot_preview1" "fd_write" (func $write (param i32 i32 i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "poll_oneoff" (func $poll (param i32 i32 i32 i32) (result i32)))
  (memory (export "memory") 1)
  (data (i32.const 16) "tick\n")
  (func (export "_start")
    (i32.store (i32.const 0) (i32.const 16))
    (i32.store (i32.const 4) (i32.const 5))
    ;; subscription at 64: clock (tag 0), monotonic, 500 ms, relative
    (i32.store (i32.const 80) (i32.const 1))
    (i64.store (i32.const 88) (i64.const 500000000))
    (loop $l
      (drop (call $write (i32.const 1) (i32.const 0) (i32.const 1) (i32.const 8)))
      (drop (call $poll (i32.const 64) (i32.const 128) (i32.const 1) (i32.const 192)))
      (br $l))))
