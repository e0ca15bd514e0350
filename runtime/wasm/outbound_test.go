package wasm

import (
	"cmp"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/dunlin-project/dunlin/runtime/workload"
)

func buildGo(t *testing.T, folder string) string {
	t.Helper()
	out := filepath.Join(t.TempDir(), filepath.Base(folder)+".wasm")
	cmd := exec.Command("go", "build", "-trimpath", "-ldflags", "-s -w", "-o", out, ".")
	cmd.Dir = folder
	cmd.Env = append(os.Environ(), "GOOS=wasip1", "GOARCH=wasm", "CGO_ENABLED=0")
	if b, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build %s: %v: %s", folder, err, b)
	}
	return out
}

// A Go guest calls an HTTP API, in the real host process with its sandbox: not
// without an annotation, not by one that is too wide, and by one that is for
// just that address.
func TestGoGuestCallsOut(t *testing.T) {
	asked := make(chan string, 100)
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked <- r.RemoteAddr
		_, _ = fmt.Fprintf(w, "you asked for %s", r.URL.Path)
	}))
	defer srv.Close()
	module := buildGo(t, "../../examples/outbound-http")
	addr := srv.Listener.Addr().String()
	b := newBench(t)
	run := func(name, allow, url, every string) workload.Spec {
		t.Helper()
		s := b.specFile(module, name)
		s.Env = []string{"URL=" + url, "EVERY=" + every}
		s.Outbound = workload.Outbound{Allow: allow}
		b.start(s)
		return s
	}
	s := run("allowed", "10.0.0.0/8:80 "+addr, srv.URL+"/x", "0s")
	if st := b.ended(s.ID); st.ExitCode != 0 || !strings.Contains(b.log(s), "200 OK: you asked for /x") {
		t.Fatalf("%+v: %s", st, b.log(s))
	}
	for name, c := range map[string]struct{ allow, want, url string }{
		"none": {"", "no such annotation; to allow it, annotate the pod with dunlin.dev/outbound: \"" + addr + "\"", ""},
		"wide": {"0.0.0.0/0:*", "the node's loopback, which only an entry for just that range opens", ""},
		"port": {"127.0.0.1:1", "no entry of the annotation has it", ""},
		// The port that the guest will connect to goes along with the name.
		"name":      {"x.test:1", `annotate the pod with dunlin.dev/outbound: "api.test:8081"`, "http://api.test:8081"},
		"localhost": {"", `annotate the pod with dunlin.dev/outbound: "127.0.0.1:8081"`, "http://localhost:8081"},
	} {
		s := run(name, c.allow, cmp.Or(c.url, srv.URL), "10ms")
		b.until(name+" failed more than once", func() bool { return strings.Count(b.log(s), "failed:") > 3 })
		log := b.log(s)
		if strings.Count(log, "dunlin: ") != 1 || !strings.Contains(log, "dunlin.dev/outbound") || name != "port" && !strings.Contains(log, c.want) {
			t.Errorf("%s: want one line with %q: %s", name, c.want, log)
		}
		// The agent is told, too, for an event.
		st, _, err := b.State(t.Context(), s.ID)
		if err != nil || len(st.Refused) != 1 || st.Refused[0].Entry == "" || !strings.Contains(log, st.Refused[0].What) {
			t.Errorf("%s: the agent hears of %+v: %v", name, st.Refused, err)
		}
		if err := b.Kill(t.Context(), s.ID); err != nil {
			t.Fatal(err)
		}
	}
	if n := len(asked); n != 1 {
		t.Errorf("%d requests arrived", n)
	}
	// Nobody listens there: an error, and not a wait.
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	_ = l.Close()
	s = run("refused", l.Addr().String(), "http://"+l.Addr().String(), "0s")
	if st := b.ended(s.ID); st.ExitCode != 0 || !strings.Contains(strings.ToLower(b.log(s)), "connection refused") {
		t.Errorf("%+v: %s", st, b.log(s))
	}
}

// A C guest speaks MQTT to a real broker, both ways.
func TestCGuestSpeaksMQTT(t *testing.T) {
	for _, p := range []string{"mosquitto", "mosquitto_pub", "clang"} {
		if _, err := exec.LookPath(p); err != nil {
			t.Skipf("SKIPPED: %s is not installed (test/setup.sh installs it as root)", p)
		}
	}
	dir := t.TempDir()
	module := filepath.Join(dir, "mqtt.wasm")
	if out, err := exec.Command("clang", "--target=wasm32-wasi", "-Os", "-s", "-I../../sdk/c", "-o", module, "../../examples/mqtt/mqtt.c", "../../sdk/c/dunlin_outbound.c").CombinedOutput(); err != nil {
		t.Skipf("SKIPPED: clang cannot build for wasm32-wasi: %s", out)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := l.Addr().String()
	_, port, _ := net.SplitHostPort(addr)
	_ = l.Close()
	conf := filepath.Join(dir, "conf")
	if err := os.WriteFile(conf, []byte("listener "+port+" 127.0.0.1\nallow_anonymous true\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	broker := exec.Command("mosquitto", "-c", conf)
	if err := broker.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = broker.Process.Kill(); _ = broker.Wait() })
	b := newBench(t)
	b.until("the broker listens", func() bool {
		c, err := net.Dial("tcp", addr)
		if err == nil {
			_ = c.Close()
		}
		return err == nil
	})
	s := b.specFile(module, "mqtt")
	s.Env = []string{"BROKER=" + addr, "TOPIC=dunlin/test"}
	s.Outbound = workload.Outbound{Allow: addr}
	b.start(s)
	b.says(s, "connected to "+addr)
	out, err := exec.Command("mosquitto_sub", "-p", port, "-t", "dunlin/test", "-C", "1", "-W", "30").Output()
	if err != nil || !strings.HasPrefix(string(out), "reading ") {
		t.Fatalf("%q %v: %s", out, err, b.log(s))
	}
	if err := exec.Command("mosquitto_pub", "-p", port, "-t", "dunlin/test/set", "-m", "on").Run(); err != nil {
		t.Fatal(err)
	}
	b.says(s, "received on dunlin/test/set: on")
	if err := b.Stop(t.Context(), s.ID, time.Second); err != nil {
		t.Fatal(err)
	}
}
