// Command journal is a WASI preview 1 guest that keeps its data in a claim: at
// each start it adds a line to /data/journal and prints all that is there, so
// that its log tells how many pods the data has seen.
package main

import (
	"fmt"
	"io"
	"log"
	"os"
	"time"
)

func main() {
	log.SetFlags(0)
	if err := keep("/data/journal"); err != nil {
		log.Fatal(err)
	}
	_, _ = io.Copy(io.Discard, os.Stdin) // which ends when the pod shall stop
}

func keep(path string) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("open the journal: %w", err)
	}
	if _, err := fmt.Fprintf(f, "%s started at %s\n", os.Getenv("POD"), time.Now().UTC().Format(time.RFC3339)); err != nil {
		return fmt.Errorf("write the journal: %w", err)
	}
	if err := f.Sync(); err != nil {
		return fmt.Errorf("write the journal: %w", err)
	}
	if err := f.Close(); err != nil {
		return fmt.Errorf("write the journal: %w", err)
	}
	b, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("read the journal: %w", err)
	}
	if _, err := os.Stdout.Write(b); err != nil {
		return fmt.Errorf("print the journal: %w", err)
	}
	return nil
}
