// Command hello is an HTTP server as a WASI preview 1 guest of dunlin.
//
// It opens no port: dunlin hands it a listener that is open already, as
// descriptor DUNLIN_LISTEN_FD, for the first containerPort of its pod. To
// stop it, dunlin closes the listener to new connections and ends standard
// input; the server then tells its clients with each answer to come back on
// another connection, and exits once they have gone, or after a while. That is
// what makes a rolling update lose no request.
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

// drainFor is how long clients that keep connections open are given.
const drainFor = 10 * time.Second

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
	var draining atomic.Bool
	var open atomic.Int64
	s := &http.Server{ReadHeaderTimeout: 10 * time.Second, IdleTimeout: time.Minute,
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if draining.Load() {
				w.Header().Set("Connection", "close")
			}
			mux.ServeHTTP(w, r)
		}),
		ConnState: func(_ net.Conn, to http.ConnState) {
			switch to {
			case http.StateNew:
				open.Add(1)
			case http.StateClosed, http.StateHijacked:
				open.Add(-1)
			}
		},
	}
	drained := make(chan error, 1)
	go func() {
		stopped()
		log.Print("stopping")
		ready.Store(false)
		// Shutdown closes connections that wait for a request, which may be on
		// its way: clients are given time to take the hint first.
		draining.Store(true)
		for end := time.Now().Add(drainFor); open.Load() > 0 && time.Now().Before(end); {
			<-time.After(50 * time.Millisecond)
		}
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
