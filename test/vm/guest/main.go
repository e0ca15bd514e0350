// Command guest runs inside a test guest (see test/vm/run.sh): it starts the
// product's binaries and checks what can be seen only there. Its exit code is
// the guest's verdict.
package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"time"
)

// Everything in a guest is emulated and the machine below may be busy: these
// bound a hang, they measure nothing.
const (
	waitLimit    = 2 * time.Minute
	commandLimit = 90 * time.Second
	every        = 200 * time.Millisecond
)

var scenarios = map[string]func(*guest) error{
	"v2": groupsV2, "arm64": otherProcessor, "nomemory": noMemoryGroup, "clock": clockAt1970, "slowdisk": slowDisk,
	"wasm": modules, "wasm-arm64": modules, "oci": containers, "oci-arm64": containers,
}

func main() {
	if len(os.Args) != 2 || scenarios[os.Args[1]] == nil {
		fmt.Fprintln(os.Stderr, "usage: guest SCENARIO")
		os.Exit(2)
	}
	g := &guest{ctx: context.Background(), began: time.Now(), last: time.Now()}
	err := scenarios[os.Args[1]](g)
	if err != nil {
		fmt.Printf("  FAIL %v\n", err)
		g.serverLog()
		g.kill()
		os.Exit(1)
	}
}

// guest is the machine that the checks run on.
type guest struct {
	ctx         context.Context
	began, last time.Time
	server      *exec.Cmd
	done        chan struct{} // closed when server has ended
	api         *api
}

// ok prints a step that held, with its time.
func (g *guest) ok(format string, args ...any) {
	now := time.Now()
	fmt.Printf("  ok   %s (%.1f s)\n", fmt.Sprintf(format, args...), now.Sub(g.last).Seconds())
	g.last = now
}

// run runs a program to its end; out is all that it printed.
func (g *guest) run(argv ...string) (out string, code int, err error) {
	ctx, cancel := context.WithTimeout(g.ctx, commandLimit)
	defer cancel()
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	var b bytes.Buffer
	cmd.Stdout, cmd.Stderr = &b, &b
	err = cmd.Run()
	var exit *exec.ExitError
	if errors.As(err, &exit) && ctx.Err() == nil {
		return b.String(), exit.ExitCode(), nil
	}
	if err != nil {
		err = fmt.Errorf("%s: %w: %s", strings.Join(argv, " "), err, b.String())
	}
	return b.String(), 0, err
}

// must runs a program that must succeed.
func (g *guest) must(argv ...string) (string, error) {
	out, code, err := g.run(argv...)
	if err == nil && code != 0 {
		err = fmt.Errorf("%s: exit code %d: %s", strings.Join(argv, " "), code, out)
	}
	return out, err
}

// until polls a condition; its last error is the reason of a failure.
func (g *guest) until(what string, f func() error) error {
	deadline := time.After(waitLimit)
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		err := f()
		if err == nil {
			return nil
		}
		select {
		case <-deadline:
			return fmt.Errorf("waited %s for: %s; last: %w", waitLimit, what, err)
		case <-g.done:
			return fmt.Errorf("the server ended while waiting for: %s; last: %w", what, err)
		case <-tick.C:
		}
	}
}

const (
	serverLogPath = "/tmp/server.log"
	kubeconfig    = "/etc/dunlin/admin.kubeconfig"
)

// start runs the server with its node, in the default folders.
func (g *guest) start() error {
	log, err := os.OpenFile(serverLogPath, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("server log: %w", err)
	}
	defer func() { _ = log.Close() }()
	cmd := exec.Command("/dunlin", "server", "--node-name", "vm", "--listen", "127.0.0.1:6443")
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start the server: %w", err)
	}
	g.server, g.done = cmd, make(chan struct{})
	go func(done chan struct{}) { _ = cmd.Wait(); close(done) }(g.done)
	return g.until("the API answers", func() (err error) {
		if g.api, err = newAPI(kubeconfig); err != nil {
			return err
		}
		_, err = g.api.node(g.ctx)
		return err
	})
}

// kill ends the server with SIGKILL; its guests must not notice.
func (g *guest) kill() {
	if g.server == nil {
		return
	}
	_ = g.server.Process.Kill()
	<-g.done
	g.server, g.done = nil, nil
}

// stop ends the server in order.
func (g *guest) stop() error {
	if err := g.server.Process.Signal(os.Interrupt); err != nil {
		return fmt.Errorf("stop the server: %w", err)
	}
	select {
	case <-g.done:
	case <-time.After(waitLimit):
		return errors.New("the server does not end on SIGINT")
	}
	code := g.server.ProcessState.ExitCode()
	g.server, g.done = nil, nil
	if code != 0 {
		return fmt.Errorf("the server ended with exit code %d", code)
	}
	return nil
}

func (g *guest) serverLog() {
	b, err := os.ReadFile(serverLogPath)
	if err != nil {
		return
	}
	if len(b) > 6000 {
		b = b[len(b)-6000:]
	}
	fmt.Printf("the server's log ends:\n%s\n", b)
}

// importModule gives the node a module of the initial file system.
func (g *guest) importModule(names ...string) error {
	for _, n := range names {
		if _, err := g.must("/dunlin", "import", n+".wasm", "/wasm/"+n+".wasm"); err != nil {
			return err
		}
	}
	return nil
}

func (g *guest) apply(manifest string) error {
	const f = "/tmp/manifest.yaml"
	if err := os.WriteFile(f, []byte(manifest), 0o600); err != nil {
		return fmt.Errorf("write manifest: %w", err)
	}
	_, err := g.must("/dunlin", "--kubeconfig", kubeconfig, "apply", "-f", f)
	return err
}

// says checks that a text has all of the wanted parts.
func says(text string, wants ...string) error {
	for _, w := range wants {
		if !strings.Contains(text, w) {
			return fmt.Errorf("%q is not in:\n%s", w, text)
		}
	}
	return nil
}
