;; Waits for the end of its standard input, then says goodbye and exits.
(module
  (import "wasi_snapshot_preview1" "fd_write" (func $write (param i32 i32 i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "fd_read" (func $read (param i32 i32 i32 i32) (result i32)))
  (memory (export "memory") 1)
  (data (i32.const 0) "\10\00\00\00\06\00\00\00\00\00\00\00\00\00\00\00ready\n")
  (data (i32.const 32) "\28\00\00\00\08\00\00\00goodbye\n")
  (data (i32.const 64) "\80\00\00\00\40\00\00\00")
  (func $_start (export "_start")
    (drop (call $write (i32.const 1) (i32.const 0) (i32.const 1) (i32.const 96)))
    (loop $l
      (br_if $l (i32.and (i32.eqz (call $read (i32.const 0) (i32.const 64) (i32.const 1) (i32.const 96)))
                         (i32.ne (i32.load (i32.const 96)) (i32.const 0)))))
    (drop (call $write (i32.const 1) (i32.const 32) (i32.const 1) (i32.const 96)))))
