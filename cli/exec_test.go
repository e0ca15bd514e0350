package cli

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/dunlin-project/dunlin/controlplane/api"
	"github.com/dunlin-project/dunlin/controlplane/podstream"
	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/wire"
	"github.com/dunlin-project/dunlin/wire/mux"
)

// hereNode is a node whose pods' programs are processes of this machine, and
// whose ports are this machine's.
type hereNode struct {
	t  *testing.T
	wg sync.WaitGroup
}

// Session implements podstream.Nodes.
func (n *hereNode) Session(_ context.Context, p *corev1.Pod, kind, container string) (*mux.Mux, error) {
	if p.Name == "guest" && kind == "exec" {
		return nil, apierrors.NewBadRequest("container " + container + " is a Wasm guest")
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	defer func() { _ = l.Close() }()
	here, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		return nil, err
	}
	there, err := l.Accept()
	if err != nil {
		return nil, err
	}
	m := mux.New(there, false, 16)
	n.wg.Go(func() {
		defer m.Close("")
		if kind == "portforward" {
			n.forward(m)
			return
		}
		n.exec(m, container)
	})
	return mux.New(here, true, 0), nil
}

func (n *hereNode) exec(m *mux.Mux, container string) {
	ctl, err := m.Accept()
	if err != nil {
		return
	}
	o := &wire.ExecOpen{}
	if err := wire.ReadMessage(ctl, o); err != nil {
		return
	}
	ends := map[string]*mux.Stream{}
	for _, wanted := range []bool{o.Stdin, o.Stdout, o.Stderr} {
		if !wanted {
			continue
		}
		st, err := m.Accept()
		if err != nil {
			return
		}
		ends[string(st.What())] = st
	}
	if o.Command == nil {
		o.Command = []string{"sh", "-c", "read x; echo attached to $0: $x", container}
	}
	cmd := exec.CommandContext(n.t.Context(), o.Command[0], o.Command[1:]...)
	cmd.Env = append(os.Environ(), "CONTAINER="+container)
	if o.TTY {
		for range 2 { // the first size, and one more
			z := &wire.TerminalSize{}
			if err := wire.ReadMessage(ctl, z); err != nil {
				n.t.Errorf("no size: %v", err)
			}
			fmt.Fprintf(ends[wire.StreamStdout], "size %dx%d\n", z.Width, z.Height)
		}
	}
	in, err := cmd.StdinPipe()
	if err != nil {
		n.t.Error(err)
		return
	}
	cmd.Stdout = ends[wire.StreamStdout]
	if e := ends[wire.StreamStderr]; e != nil {
		cmd.Stderr = e
	}
	end := &wire.ExecEnd{}
	if err := cmd.Start(); err != nil {
		end.Error = err.Error()
	} else {
		n.wg.Go(func() {
			if st := ends[wire.StreamStdin]; st != nil {
				_, _ = io.Copy(in, st) // to the end of either
			}
			_ = in.Close()
		})
		n.wg.Go(func() {
			<-m.Done()
			_ = cmd.Process.Kill()
		})
		_ = cmd.Wait()
		end.ExitCode = int32(cmd.ProcessState.ExitCode())
	}
	for name, st := range ends {
		if name == wire.StreamStdin {
			st.Reset("it has ended")
			continue
		}
		_ = st.CloseWrite()
	}
	_ = wire.WriteMessage(ctl, end)
	<-m.Done()
}

func (n *hereNode) forward(m *mux.Mux) {
	for {
		st, err := m.Accept()
		if err != nil {
			return
		}
		d := &wire.DialRequest{}
		if err := wire.Unmarshal(st.What(), d); err != nil {
			n.t.Error(err)
		}
		conn, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", d.Port))
		if err != nil {
			_ = wire.WriteMessage(st, &wire.DialReply{Error: "connection refused"})
			_ = st.CloseWrite()
			continue
		}
		_ = wire.WriteMessage(st, &wire.DialReply{})
		n.wg.Go(func() {
			_, _ = io.Copy(conn, st)
			_ = conn.(*net.TCPConn).CloseWrite()
		})
		n.wg.Go(func() {
			_, _ = io.Copy(st, conn)
			_ = st.CloseWrite()
		})
	}
}

// streamWorld has pods web (with containers main and side), solo, and guest,
// all of them running.
func streamWorld(t *testing.T) *world {
	t.Helper()
	n := &hereNode{t: t}
	t.Cleanup(n.wg.Wait)
	w := newWorld(t, func(c *api.Config) {
		s, err := podstream.New(podstream.Config{Nodes: n})
		if err != nil {
			t.Fatal(err)
		}
		c.Streams = s
	})
	for _, name := range []string{"web", "solo", "guest"} {
		p := &corev1.Pod{}
		p.Name, p.Namespace, p.Labels = name, "default", map[string]string{"app": name}
		p.Spec.Containers = []corev1.Container{{Name: "main", Image: "x", Stdin: true}}
		if name == "web" {
			p.Spec.Containers = append(p.Spec.Containers, corev1.Container{Name: "side", Image: "x"})
		}
		if _, err := w.reg.Create(t.Context(), p, registry.WriteOptions{}); err != nil {
			t.Fatal(err)
		}
		if _, err := w.reg.Update(t.Context(), podKind, "default", name, registry.Status, running, registry.WriteOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	return w
}

// runIn is run with an input.
func runIn(in io.Reader, args ...string) (code int, out, errs string) {
	var o, e bytes.Buffer
	code = Main(args, in, &o, &e)
	return code, o.String(), e.String()
}

func TestExec(t *testing.T) {
	streamWorld(t)
	for _, c := range []struct {
		in, line  string
		code      int
		out, errs string // errs is contained
	}{
		{"", "exec solo -- sh -c|echo out; echo err >&2; exit 3", 3, "out\n", "err\n"},
		{"", "exec solo -- cat", 0, "", ""}, // no -i: its input is empty
		{"ignored", "exec solo -- sh -c|wc -c", 0, "0\n", ""},
		{strings.Repeat("0123456789", 100_000), "exec -i solo -- wc -c", 0, "1000000\n", ""},
		{"x", "exec -it solo -- cat", 0, "x", "the input is not a terminal"},
		{"", "exec -t solo -- true", 0, "", "-t without -i"},
		{"", "exec web -- sh -c|echo $CONTAINER", 0, "main\n", "Defaulted container \"main\" out of: main, side\n"},
		{"", "exec web -c side -- sh -c|echo $CONTAINER", 0, "side\n", ""},
		{"", "exec web -c none -- true", 1, "", "container none is not valid for pod web"},
		{"", "exec none -- true", 1, "", `pods "none" not found`},
		{"", "exec guest -- true", 1, "", "Error: container main is a Wasm guest\n"},
		{"", "exec solo -- /no/such/program", 1, "", "/no/such/program"},
		{"", "exec solo ls", 2, "", "dunlin exec solo -- ls"},
		{"hi\n", "attach -i solo", 0, "attached to main: hi\n", ""},
		{"", "attach solo", 0, "attached to main:\n", ""},
		{"", "attach -i web -c side", 1, "", `needs "stdin: true"`},
	} {
		head, script, ok := strings.Cut(c.line, "|")
		args := strings.Fields(head)
		if ok {
			args = append(args, script)
		}
		code, out, errs := runIn(strings.NewReader(c.in), args...)
		if code != c.code || strings.TrimLeft(out, " ") != c.out || !strings.Contains(errs, c.errs) || c.errs == "" && errs != "" {
			t.Errorf("dunlin %s: exit %d\n%q\n%q", c.line, code, out, errs)
		}
	}
}

// TestExecInputFails: an input that cannot be read is not an input that ends.
func TestExecInputFails(t *testing.T) {
	streamWorld(t)
	r, w := io.Pipe()
	_ = w.CloseWithError(errors.New("disk on fire"))
	if code, _, errs := runIn(r, "exec", "-i", "solo", "--", "sh", "-c", "cat; sleep 1000"); code != 1 || !strings.Contains(errs, "read the input: disk on fire") {
		t.Errorf("exit %d %s", code, errs)
	}
}

// TestExecInterrupted: Ctrl-C without a terminal ends the command there too,
// and gives the exit code that shells give.
func TestExecInterrupted(t *testing.T) {
	streamWorld(t)
	out := &watched{lines: make(chan string, 10)}
	var errs bytes.Buffer
	done := make(chan int, 1)
	go func() {
		done <- Main([]string{"exec", "solo", "--", "sh", "-c", "echo begun; exec sleep 1000"}, strings.NewReader(""), out, &errs)
	}()
	<-out.lines
	if err := syscall.Kill(os.Getpid(), syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	if code := <-done; code != 130 || !strings.Contains(errs.String(), "interrupted by SIGINT") {
		t.Errorf("exit %d %s", code, errs.String())
	}
}

// TestExecTerminal: sizes and keys go there, and the terminal is as it was.
func TestExecTerminal(t *testing.T) {
	streamWorld(t)
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Skipf("no pseudo-terminals: %v", err)
	}
	defer func() { _ = master.Close() }()
	fd := int(master.Fd())
	if err := unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	n, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	tty, err := os.OpenFile("/dev/pts/"+strconv.Itoa(n), os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tty.Close() }()
	size := func(w, h uint16) {
		if err := unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Col: w, Row: h}); err != nil {
			t.Error(err)
		}
	}
	before, err := unix.IoctlGetTermios(int(tty.Fd()), unix.TCGETS)
	if err != nil {
		t.Fatal(err)
	}
	size(80, 24)
	out := &watched{lines: make(chan string, 10)}
	done := make(chan int, 1)
	go func() {
		done <- Main([]string{"exec", "-it", "solo", "--", "sh", "-c", "head -c 1 | od -An -tx1; exit 5"}, tty, out, io.Discard)
	}()
	if got := <-out.lines; got != "size 80x24" {
		t.Errorf("%q", got)
	}
	size(100, 30)
	if err := syscall.Kill(os.Getpid(), syscall.SIGWINCH); err != nil {
		t.Fatal(err)
	}
	if got := <-out.lines; got != "size 100x30" {
		t.Errorf("%q", got)
	}
	if _, err := master.Write([]byte{3}); err != nil { // Ctrl-C, which is raw
		t.Fatal(err)
	}
	if got := strings.TrimSpace(<-out.lines); got != "03" {
		t.Errorf("%q", got)
	}
	if code := <-done; code != 5 {
		t.Errorf("exit %d", code)
	}
	after, err := unix.IoctlGetTermios(int(tty.Fd()), unix.TCGETS)
	if err != nil || *after != *before {
		t.Errorf("%+v, was %+v, %v", after, before, err)
	}
}

func TestPortForward(t *testing.T) {
	w := streamWorld(t)
	page := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(rw, r.Body)
	}))
	defer page.Close()
	port := page.Listener.Addr().(*net.TCPAddr).Port
	free, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	closed := free.Addr().(*net.TCPAddr).Port
	_ = free.Close()
	w.ok("apply", "-f", w.file("svc.yaml", fmt.Sprintf("apiVersion: v1\nkind: Service\nmetadata: {name: front}\nspec: {selector: {app: web}, ports: [{name: http, port: 80, targetPort: %d}]}\n", port)))

	ctx, cancel := context.WithCancel(t.Context())
	out := &watched{lines: make(chan string, 10)}
	errs := &watched{lines: make(chan string, 10)}
	root := (&app{in: strings.NewReader(""), out: out, errw: errs}).root()
	root.SetArgs([]string{"port-forward", "svc/front", ":http", "--address", "127.0.0.1"})
	done := make(chan error, 1)
	go func() { done <- root.ExecuteContext(ctx) }()
	address := forwarded(t, <-out.lines, port)
	body := strings.Repeat("x", 1<<20)
	resp, err := http.Post("http://"+address, "text/plain", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	got, err := io.ReadAll(resp.Body)
	_ = resp.Body.Close()
	if err != nil || string(got) != body {
		t.Errorf("%d bytes, %v", len(got), err)
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}

	// A port on which nothing listens is told, and the others go on.
	ctx, cancel = context.WithCancel(t.Context())
	defer cancel()
	root = (&app{in: strings.NewReader(""), out: out, errw: errs}).root()
	root.SetArgs([]string{"port-forward", "web", fmt.Sprintf(":%d", closed), "--address", "127.0.0.1"})
	go func() { done <- root.ExecuteContext(ctx) }()
	address = forwarded(t, <-out.lines, closed)
	knock := func() {
		conn, err := net.Dial("tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		if b, err := io.ReadAll(conn); len(b) != 0 {
			t.Errorf("%q, %v", b, err)
		}
		_ = conn.Close()
	}
	knock()
	if got := <-errs.lines; !strings.Contains(got, fmt.Sprintf("port %d: ", closed)) || !strings.Contains(got, "connection refused") {
		t.Errorf("%q", got)
	}
	w.ok("delete", "pod", "web", "--force", "--grace-period=0")
	knock()
	if err := <-done; err == nil || !strings.Contains(err.Error(), "no more connections to pod web") {
		t.Errorf("without its pod: %v", err)
	}
}

// forwarded is the local address of a line of port-forward.
func forwarded(t *testing.T, line string, port int) string {
	t.Helper()
	address, ok := strings.CutPrefix(line, "Forwarding from ")
	address, ok2 := strings.CutSuffix(address, fmt.Sprintf(" -> %d", port))
	if !ok || !ok2 {
		t.Fatalf("%q", line)
	}
	return address
}

func TestPortForwardArguments(t *testing.T) {
	w := streamWorld(t)
	w.ok("apply", "-f", w.file("svc.yaml", "apiVersion: v1\nkind: Service\nmetadata: {name: front}\nspec: {selector: {app: web}, ports: [{name: http, port: 80}]}\n"))
	busy, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = busy.Close() }()
	for line, want := range map[string]struct {
		code int
		says string
	}{
		"web x:80":    {2, `"x" is no local port`},
		"web 80:":     {2, `"" is no port of a pod`},
		"web 1:2:3":   {2, `"2:3" is no port of a pod`},
		"web 70000":   {2, `"70000" is no port of a pod`},
		"web :none":   {1, `no container of pod web has a port named "none"`},
		"svc/front 8": {1, "service front has no port 8 (it has 80/http)"},
		"none 80":     {1, `pods "none" not found`},
		fmt.Sprintf("web %d:80", busy.Addr().(*net.TCPAddr).Port): {1, "address already in use"},
	} {
		if code, _, errs := run(append([]string{"port-forward"}, strings.Fields(line)...)...); code != want.code || !strings.Contains(errs, want.says) {
			t.Errorf("dunlin port-forward %s: exit %d %s", line, code, errs)
		}
	}
}
