;; Its start function, which runs while it is instantiated, never ends.
(module
  (import "wasi_snapshot_preview1" "fd_write" (func $fd_write (param i32 i32 i32 i32) (result i32)))
  (memory (export "memory") 1)
  (data (i32.const 8) "\10\00\00\00\08\00\00\00")
  (data (i32.const 16) "looping\n")
  (func $s
    (drop (call $fd_write (i32.const 1) (i32.const 8) (i32.const 1) (i32.const 0)))
    (loop (br 0)))
  (start $s)
  (func (export "_start")))
