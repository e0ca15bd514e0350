package consensus

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/dunlin-project/dunlin/controlplane/state"
)

var crashAll = flag.Bool("crash.all", false, "kill at every write point instead of a sample")

// The child's instructions.
const (
	envCrashDir = "DUNLIN_TEST_CRASH_DIR"
	envCrashAt  = "DUNLIN_TEST_CRASH_AT" // number of the event to die at; 0 is never
	envCrashOps = "DUNLIN_TEST_CRASH_OPS"
)

func TestMain(m *testing.M) {
	if dir := os.Getenv(envCrashDir); dir != "" {
		os.Exit(crashChild(dir))
	}
	os.Exit(m.Run())
}

// crashDisk kills this process at the n-th event; a write that is the n-th
// event is torn first.
func crashDisk(at int64) *Disk {
	var count atomic.Int64
	die := func() {
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {}
	}
	torn := false
	return &Disk{Observe: func(e DiskEvent) error {
		if torn && e.Done {
			die()
		}
		if count.Add(1) == at {
			if e.Op == DiskWrite && !e.Done && at%2 == 0 {
				torn = true
				return ErrTear
			}
			die()
		}
		return nil
	}}
}

// crashConfig makes everything happen within a few commits: rotations,
// snapshots, truncations.
func crashConfig(dir string) Config {
	return Config{Dir: dir, ClusterID: "cluster-1", ServerID: "server-1", Log: slog.New(slog.DiscardHandler),
		SegmentBytes: 8 << 10, SnapshotBytes: 8 << 10}
}

// crashSlots is how many triples of objects there are: the log grows, the
// state does not, so that snapshots fall due.
const crashSlots = 3

// crashOps is the i-th change: three objects of one triple, which belong
// together only because they travel in one entry.
func crashOps(i int) []state.Op {
	ops := make([]state.Op, 3)
	for part := range ops {
		r := object("ConfigMap", "", fmt.Sprintf("c-%d-%d", i%crashSlots, part))
		r.Spec.Data = fmt.Appendf(nil, "%d %s", i, strings.Repeat("x", 500))
		ops[part] = state.Op{Type: state.OpUpdate, Record: r, UID: r.Header.UID}
		if i < crashSlots {
			ops[part] = state.Op{Type: state.OpCreate, Record: r}
		}
	}
	return ops
}

// crashChild commits objects, three at a time in one entry, and says so.
func crashChild(dir string) int {
	at, _ := strconv.ParseInt(os.Getenv(envCrashAt), 10, 64)
	ops, _ := strconv.Atoi(os.Getenv(envCrashOps))
	cfg := crashConfig(dir)
	cfg.Disk = crashDisk(at)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	n, err := Open(ctx, cfg)
	if err != nil {
		fmt.Println("fail", err)
		return 1
	}
	if _, err := n.WaitLeading(ctx); err != nil {
		fmt.Println("fail", err)
		return 1
	}
	for i := range ops {
		res, err := n.Propose(ctx, crashOps(i))
		if err != nil {
			fmt.Println("fail", err)
			return 1
		}
		if r := res[0].Reason; r != state.ReasonNone && r != state.ReasonExists {
			fmt.Println("fail reason", r)
			return 1
		}
		fmt.Println("ack", i)
	}
	if err := n.Close(); err != nil {
		fmt.Println("fail", err)
		return 1
	}
	return 0
}

// runCrashChild returns what the child acknowledged, and whether it was killed.
func runCrashChild(t *testing.T, dir string, at, ops int) (acked int, killed bool) {
	t.Helper()
	cmd := exec.CommandContext(testContext(t), os.Args[0])
	cmd.Env = append(os.Environ(), envCrashDir+"="+dir, envCrashAt+"="+strconv.Itoa(at), envCrashOps+"="+strconv.Itoa(ops))
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		switch f := strings.Fields(lines.Text()); f[0] {
		case "ack":
			acked++
		default:
			t.Errorf("at %d: %s", at, lines.Text())
		}
	}
	err = cmd.Wait()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		ws, ok := exit.Sys().(syscall.WaitStatus)
		return acked, ok && ws.Signaled()
	}
	if err != nil {
		t.Fatal(err)
	}
	return acked, false
}

// checkCrash opens what a crash left: it must be what the first changes made,
// whole, at least the durable ones and at most the one after those that were
// acknowledged.
func checkCrash(t *testing.T, dir string, at, durable, acked int) {
	t.Helper()
	cfg := crashConfig(dir)
	cfg.Log = testLog(t)
	n, err := Open(testContext(t), cfg)
	if err != nil {
		t.Fatalf("at %d: %v", at, err)
	}
	defer func() { _ = n.Close() }()
	if _, err := n.WaitLeading(testContext(t)); err != nil {
		t.Fatalf("at %d: %v", at, err)
	}
	s := n.State().Snapshot()
	var got [crashSlots]int
	for slot := range got {
		var parts [3]int
		for part, op := range crashOps(slot) {
			parts[part] = -1
			if r, ok := s.Get(op.Record.Header.Key); ok {
				parts[part], _ = strconv.Atoi(strings.Fields(string(r.Spec.Data))[0])
			}
		}
		if parts[0] != parts[1] || parts[1] != parts[2] {
			t.Fatalf("at %d: half applied: %v", at, parts)
		}
		got[slot] = parts[0]
	}
	// after is what the slots hold when the first changes are there, and no other.
	after := func(changes int) (slots [crashSlots]int) {
		for slot := range slots {
			slots[slot] = -1
			for i := slot; i < changes; i += crashSlots {
				slots[slot] = i
			}
		}
		return slots
	}
	whole := false
	for changes := durable; changes <= acked+1; changes++ {
		whole = whole || got == after(changes)
	}
	if !whole {
		t.Fatalf("at %d: the slots hold changes %v; of %d that were acknowledged %d must be there: %v", at, got, acked, durable, after(durable))
	}
	if f := n.State().Facts(); f.Epoch != 1 {
		t.Errorf("at %d: a crash is no loss, but the epoch is %d", at, f.Epoch)
	}
	mustPropose(t, n, state.Op{Type: state.OpCreate, Record: object("ConfigMap", "", fmt.Sprintf("after-%d", n.Stats().LastIndex))})
}

// TestCrash kills a child at each point where it touches the disk, in turn,
// and checks that nothing acknowledged is lost and nothing is half applied.
func TestCrash(t *testing.T) {
	const ops = 45
	dir := t.TempDir()
	step := 7 // a sample that differs in parity and reaches every kind of point
	if *crashAll {
		step = 1
	}
	points, snapshots := 0, 0
	for at := 1; ; at += step {
		folder := fmt.Sprintf("%s/%d", dir, at)
		acked, killed := runCrashChild(t, folder, at, ops)
		if !killed {
			if acked != ops {
				t.Errorf("the undisturbed child acknowledged %d of %d", acked, ops)
			}
			if entries, err := os.ReadDir(folder + "/snapshots"); err == nil {
				snapshots = len(entries)
			}
			break
		}
		points++
		checkCrash(t, folder, at, acked, acked)
		if err := os.RemoveAll(folder); err != nil {
			t.Fatal(err)
		}
	}
	if snapshots < 4 {
		t.Errorf("%d snapshot files: the script takes too few snapshots", snapshots)
	}
	t.Logf("killed at %d points", points)
}
