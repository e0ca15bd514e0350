// Command shop is the shop's API as a WASI preview 1 guest: it counts in redis
// what was bought.
//
//	POST /buy/ITEM    one more was bought; answers how many there are
//	GET  /sold/ITEM   how many were bought
//	GET  /healthz     whether redis answers
package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	dunlin "github.com/dunlin-project/dunlin/sdk/go"
)

func main() {
	log.SetFlags(0)
	if err := serve(); err != nil {
		log.Fatal(err)
	}
}

func serve() error {
	l, err := listener()
	if err != nil {
		return err
	}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /buy/{item}", func(w http.ResponseWriter, r *http.Request) { answer(w, "INCR", "sold:"+r.PathValue("item")) })
	mux.HandleFunc("GET /sold/{item}", func(w http.ResponseWriter, r *http.Request) { answer(w, "GET", "sold:"+r.PathValue("item")) })
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { answer(w, "PING") })
	s := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	stopped := make(chan error, 1)
	go func() {
		// The end of standard input is dunlin's word to stop.
		if syscall.SetNonblock(0, true) == nil {
			_, _ = io.Copy(io.Discard, os.NewFile(0, "stdin"))
			stopped <- s.Shutdown(context.Background())
		}
	}()
	log.Print("open")
	if err = s.Serve(l); errors.Is(err, http.ErrServerClosed) || errors.Is(err, syscall.EINVAL) {
		return <-stopped
	}
	return err
}

// listener takes over the listener that dunlin opened for the containerPort.
func listener() (net.Listener, error) {
	fd, err := strconv.Atoi(os.Getenv("DUNLIN_LISTEN_FD"))
	if err != nil {
		return nil, errors.New("DUNLIN_LISTEN_FD is not set: give the container a containerPort")
	}
	if err := syscall.SetNonblock(fd, true); err != nil {
		return nil, fmt.Errorf("listener: %w", err)
	}
	return net.FileListener(os.NewFile(uintptr(fd), "listener"))
}

func answer(w http.ResponseWriter, command ...string) {
	value, err := ask(command...)
	if err != nil {
		log.Printf("redis: %v", err)
		http.Error(w, "the till is closed: "+err.Error(), http.StatusServiceUnavailable)
		return
	}
	fmt.Fprintln(w, value)
}

// ask sends one command to redis (RESP2), on a connection of its own.
func ask(command ...string) (string, error) {
	c, err := dunlin.Dial("tcp", os.Getenv("REDIS"))
	if err != nil {
		return "", err
	}
	defer func() { _ = c.Close() }()
	if err := c.SetDeadline(time.Now().Add(5 * time.Second)); err != nil {
		return "", err
	}
	var b strings.Builder
	fmt.Fprintf(&b, "*%d\r\n", len(command))
	for _, part := range command {
		fmt.Fprintf(&b, "$%d\r\n%s\r\n", len(part), part)
	}
	if _, err := io.WriteString(c, b.String()); err != nil {
		return "", err
	}
	r := bufio.NewReader(c)
	line, err := r.ReadString('\n')
	if err != nil {
		return "", err
	}
	kind, rest := line[0], strings.TrimSuffix(line[1:], "\r\n")
	switch kind {
	case '+', ':':
		return rest, nil
	case '$':
		n, err := strconv.Atoi(rest)
		if err != nil || n > 1<<20 {
			return "", fmt.Errorf("unexpected answer %q", line)
		}
		if n < 0 {
			return "0", nil // no such key yet
		}
		value := make([]byte, n)
		_, err = io.ReadFull(r, value)
		return string(value), err
	}
	return "", errors.New(rest)
}
