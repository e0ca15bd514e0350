// Hello is an HTTP server as a WASI preview 1 guest of dunlin.
//
// It opens no port: dunlin hands it a listener that is open already, as
// descriptor DUNLIN_LISTEN_FD, for the first containerPort of its pod. To
// stop it, dunlin closes the listener to new connections and ends standard
// input; the server then finishes the requests it has and exits.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"strconv"
	"sync/atomic"
	"syscall"
	"time"
)

// Set by the linker: the version that is shown, and whether this one never
// becomes ready (the neverready example).
var (
	version = "1"
	broken  = ""
)

func main() {
	log.SetFlags(0)
	if err := serve(); err != nil {
		log.Fatal(err)
	}
}

// listener takes over the first listener that dunlin opened.
func listener() (net.Listener, error) {
	fd, err := strconv.Atoi(os.Getenv("DUNLIN_LISTEN_FD"))
	if err != nil {
		return nil, errors.New("DUNLIN_LISTEN_FD is not set: give the container a containerPort")
	}
	// Without this, waiting for a connection would stop every goroutine.
	if err := syscall.SetNonblock(fd, true); err != nil {
		return nil, fmt.Errorf("listener: %w", err)
	}
	return net.FileListener(os.NewFile(uintptr(fd), "listener"))
}

// stopped waits until dunlin ends standard input.
func stopped() {
	if err := syscall.SetNonblock(0, true); err != nil {
		return
	}
	_, _ = io.Copy(io.Discard, os.NewFile(0, "stdin"))
}

func serve() error {
	l, err := listener()
	if err != nil {
		return err
	}
	started := time.Now()
	var ready atomic.Bool
	ready.Store(broken == "")
	name := os.Getenv("GREETING")
	if name == "" {
		name = "Hello"
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		if !ready.Load() {
			http.Error(w, "not ready", http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ok")
	})
	mux.HandleFunc("GET /", func(w http.ResponseWriter, r *http.Request) {
		host := os.Getenv("POD_NAME")
		if host == "" {
			host = "a Wasm guest"
		}
		fmt.Fprintf(w, "%s from %s (version %s, up for %s)\n", name, host, version, time.Since(started).Round(time.Millisecond))
		log.Printf("%s %s", r.Method, r.URL.Path)
	})
	s := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second, IdleTimeout: time.Minute}
	drained := make(chan error, 1)
	go func() {
		stopped()
		log.Print("stopping")
		ready.Store(false)
		drained <- s.Shutdown(context.Background())
	}()
	log.Printf("serving version %s", version)
	err = s.Serve(l)
	if errors.Is(err, http.ErrServerClosed) || errors.Is(err, syscall.EINVAL) {
		// Closed by us, or by dunlin: either way there is a stop under way.
		return <-drained
	}
	return err
}
