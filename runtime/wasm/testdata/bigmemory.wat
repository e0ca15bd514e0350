;; Starts with 128 MiB of memory.
(module (memory (export "memory") 2048) (func $_start (export "_start")))
