package wasm

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/dunlin-project/dunlin/runtime/sandbox"
	"github.com/dunlin-project/dunlin/runtime/workload"
)

func TestSandboxIsInForce(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: NEEDS ROOT: only root can give a guest another uid; CI runs this as root")
	}
	b := newBench(t)
	s := b.spec("sleep", "sleep")
	pid := b.start(s).PID
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	status := map[string]string{}
	for line := range strings.Lines(string(text)) {
		k, v, _ := strings.Cut(line, ":")
		status[k] = strings.TrimSpace(v)
	}
	uid := fmt.Sprint(b.PodUID(s.ID.PodUID))
	want := map[string]string{
		"Uid": strings.Join([]string{uid, uid, uid, uid}, "\t"), "Gid": strings.Join([]string{uid, uid, uid, uid}, "\t"),
		"Groups": "", "NoNewPrivs": "1", "CapPrm": "0000000000000000", "CapEff": "0000000000000000", "CapInh": "0000000000000000", "CapAmb": "0000000000000000",
	}
	if sandbox.Probe().Seccomp {
		want["Seccomp"] = "2"
	}
	for k, v := range want {
		if status[k] != v {
			t.Errorf("%s is %q, want %q", k, status[k], v)
		}
	}
	// A pod that asks for root gets the uid and none of its power.
	root := b.spec("sleep", "root")
	zero := int64(0)
	root.Identity = workload.Identity{UID: &zero}
	text, err = os.ReadFile(fmt.Sprintf("/proc/%d/status", b.start(root).PID))
	if err != nil || !strings.Contains(string(text), "CapEff:\t0000000000000000") || !strings.Contains(string(text), "CapPrm:\t0000000000000000") {
		t.Errorf("a guest as root: %s, %v", text, err)
	}
	env, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
	if err != nil || strings.Contains(string(env), "HOME=") {
		t.Errorf("the agent's environment: %q, %v", env, err)
	}
	// Its own session: the agent's end is not its.
	sid, err := exec.Command("ps", "-o", "sid=", "-p", fmt.Sprint(pid)).Output()
	if err == nil && strings.TrimSpace(string(sid)) != fmt.Sprint(pid) {
		t.Errorf("session %s of process %d", sid, pid)
	}
}

// The C example writes to its volume, as the pod's unprivileged uid, and
// ends when it is asked to.
func TestSensorExample(t *testing.T) {
	if _, err := exec.LookPath("clang"); err != nil {
		t.Skip("SKIPPED: clang for wasm32-wasi is not installed")
	}
	module := filepath.Join(t.TempDir(), "sensor.wasm")
	if out, err := exec.Command("clang", "--target=wasm32-wasi", "-Os", "-s", "-o", module, "../../examples/sensor/sensor.c").CombinedOutput(); err != nil {
		t.Skipf("SKIPPED: clang cannot build for wasm32-wasi: %s", out)
	}
	b := newBench(t)
	s := b.specFile(module, "sensor")
	data := t.TempDir()
	if err := os.Chmod(data, 0o777); err != nil {
		t.Fatal(err)
	}
	s.Mounts = []workload.Mount{{Source: data, Target: "/data"}}
	b.start(s)
	b.says(s, "1 readings")
	if err := b.Stop(t.Context(), s.ID, 20*time.Second); err != nil {
		t.Fatal(err)
	}
	if st := b.ended(s.ID); st.ExitCode != 0 {
		t.Errorf("ended %+v: %s", st, b.log(s))
	}
	text, err := os.ReadFile(filepath.Join(data, "readings.csv"))
	if err != nil || !strings.Contains(string(text), ",") {
		t.Errorf("%q, %v", text, err)
	}
}
