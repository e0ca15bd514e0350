package oci

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dunlin-project/dunlin/runtime/images"
	"github.com/dunlin-project/dunlin/runtime/process"
	"github.com/dunlin-project/dunlin/runtime/workload"
)

func number(n int64) *int64 { return &n }

// TestWhatAContainerIs: who it is, what it may do, what it sees.
func TestWhatAContainerIs(t *testing.T) {
	b := newBench(t)
	for _, c := range []struct {
		name, script string
		change       func(*workload.Spec)
		want         []string
		not          []string
	}{
		{name: "usual", script: "id; cat /proc/self/status; hostname; pwd; env; ls /dev; cat /proc/1/comm",
			want: []string{"uid=0(root)", "CapEff:\t00000000a80425fb", "Seccomp:\t2", "NoNewPrivs:\t0", "usual\n", "FROM=image", "PATH=/usr/local/sbin", "HOSTNAME=usual", "null\n", "HOME=/root"},
			not:  []string{"vda", "GOFLAGS"}},
		{name: "user", script: "id; cd /home/app; env | grep HOME", change: func(s *workload.Spec) {
			s.Identity = workload.Identity{UID: number(1234), Groups: []int64{500}}
			s.Security.RunAsNonRoot = true
		}, want: []string{"uid=1234(app) gid=1234(app)", "77(extra)", "500", "HOME=/home/app"}},
		{name: "strict", script: "id", change: func(s *workload.Spec) {
			s.Identity, s.Security.StrictGroups = workload.Identity{UID: number(1234), GID: number(5)}, true
		}, want: []string{"uid=1234(app) gid=5"}, not: []string{"extra"}},
		{name: "caps", script: "cat /proc/self/status", change: func(s *workload.Spec) {
			s.Security.DropCapabilities, s.Security.AddCapabilities, s.Security.NoNewPrivileges = []string{"ALL"}, []string{"NET_BIND_SERVICE", "CAP_CHOWN"}, true
		}, want: []string{"CapEff:\t0000000000000401", "CapBnd:\t0000000000000401", "NoNewPrivs:\t1"}},
		{name: "readonly", script: "touch /x 2>&1 || echo refused; touch /dev/shm/x && echo shm; touch /data/x && echo data", change: func(s *workload.Spec) {
			s.ReadOnlyRoot = true
			s.Mounts = []workload.Mount{{Source: t.TempDir(), Target: "/data"}}
		}, want: []string{"refused", "shm", "data"}},
		{name: "masked", script: "cat /proc/keys | wc -c; echo 1 > /proc/sys/kernel/panic 2>&1 || echo refused; ls /sys/firmware | wc -l", want: []string{"0\n", "refused"}},
		{name: "seccomp", script: "unshare -U true 2>&1 || echo refused", want: []string{"refused"}},
		{name: "devices", script: "mknod /tmp/d b 254 0 && (dd if=/tmp/d count=1 of=/dev/null 2>&1 || echo refused); echo x > /dev/null; head -c 1 /dev/zero | wc -c", want: []string{"refused", "1\n"}},
		{name: "privileged", script: "cat /proc/self/status; ls /dev; echo ok > /proc/self/oom_score_adj; test -w /proc/sys/kernel/panic && echo writable", change: func(s *workload.Spec) { s.Security.Privileged = true },
			want: []string{"Seccomp:\t0", "kmsg", "writable"}},
		{name: "sysctl", script: "cat /proc/sys/kernel/shm_rmid_forced; umask; ulimit -n", change: func(s *workload.Spec) { s.Security.Sysctls = map[string]string{"kernel.shm_rmid_forced": "1"} },
			want: []string{"1\n", "0022\n", "1024\n"}},
		{name: "folder", script: "pwd", change: func(s *workload.Spec) { s.WorkingDir = "/made/here" }, want: []string{"/made/here"}},
		{name: "pids", script: "i=0; while [ $i -lt 40 ]; do sleep 5 & i=$((i+1)); done 2>&1; true", change: func(s *workload.Spec) { s.Resources.PidsLimit = 20 }, want: []string{"can't fork"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			b.t = t
			s := b.sh(c.name, c.script)
			if c.change != nil {
				c.change(&s)
			}
			b.start(s)
			b.ended(s.ID)
			got := b.out(s)
			for _, w := range c.want {
				if !strings.Contains(got, w) {
					t.Errorf("%q is missing in %s", w, got)
				}
			}
			for _, w := range c.not {
				if strings.Contains(got, w) {
					t.Errorf("%q is in %s", w, got)
				}
			}
		})
	}
	b.t = t
}

// TestRefusals: what cannot be started says why, and leaves nothing.
func TestRefusals(t *testing.T) {
	b := newBench(t)
	for _, c := range []struct {
		name, reason, text string
		change             func(*workload.Spec)
	}{
		{"nocommand", "RunContainerError", "is the command right", func(s *workload.Spec) { s.Command = []string{"/no/such"} }},
		{"nonroot", "CreateContainerConfigError", "image will run as root", func(s *workload.Spec) { s.Security.RunAsNonRoot = true }},
		{"capability", "CreateContainerConfigError", `"WINGS" does not exist`, func(s *workload.Spec) { s.Security.AddCapabilities = []string{"WINGS"} }},
		{"sysctl", "SysctlForbidden", "kernel.panic", func(s *workload.Spec) { s.Security.Sysctls = map[string]string{"kernel.panic": "1"} }},
		{"profile", "CreateContainerConfigError", "seccomp profile", func(s *workload.Spec) { s.Security.Seccomp = "/no/such.json" }},
		{"deadline", "CreateContainerConfigError", "stop deadline", func(s *workload.Spec) { s.StopDeadline = time.Minute }},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := b.sh(c.name, "true")
			c.change(&s)
			_, err := b.Start(t.Context(), s)
			se, ok := err.(*workload.StartError) //nolint:errorlint // exactly this
			if !ok || se.Reason != c.reason || !strings.Contains(se.Error(), c.text) {
				t.Errorf("%#v, want reason %s and %q", err, c.reason, c.text)
			}
			if made := c.reason == "RunContainerError"; ok && se.Ended != made {
				t.Errorf("counts as an attempt: %v, want %v", se.Ended, made)
			}
			if _, ok, err := b.State(t.Context(), s.ID); ok || err != nil {
				t.Errorf("left over: %v %v", ok, err)
			}
			if mounted(filepath.Join(b.folder(s.ID), rootfsDir)) {
				t.Error("its root file system is still mounted")
			}
		})
	}
}

func TestArguments(t *testing.T) {
	img := images.RunConfig{Entrypoint: []string{"entry"}, Cmd: []string{"cmd", "x"}}
	for _, c := range []struct{ command, args, want []string }{
		{nil, nil, []string{"entry", "cmd", "x"}},
		{nil, []string{"a"}, []string{"entry", "a"}},
		{[]string{"c"}, nil, []string{"c"}},
		{[]string{"c"}, []string{"a"}, []string{"c", "a"}},
	} {
		if got := arguments(workload.Spec{Command: c.command, Args: c.args}, img); !slices.Equal(got, c.want) {
			t.Errorf("%v %v: %v, want %v", c.command, c.args, got, c.want)
		}
	}
}

func TestSignalNames(t *testing.T) {
	for name, want := range map[string]unix.Signal{"": 15, "SIGQUIT": 3, "quit": 3, "9": 9, "SIGRTMIN": 34, "SIGRTMIN+3": 37, "RTMAX-1": 63} {
		if got, err := signalNumber(name); err != nil || got != want {
			t.Errorf("%q: %v, %v, want %v", name, got, err, want)
		}
	}
	for _, name := range []string{"SIGNONE", "SIGRTMIN+99", "-1"} {
		if got, err := signalNumber(name); err == nil || got != unix.SIGTERM {
			t.Errorf("%q: %v, %v", name, got, err)
		}
	}
}

// TestStopSignalOfTheImage: the image's signal asks, not SIGTERM.
func TestStopSignalOfTheImage(t *testing.T) {
	b := newBench(t)
	img := *b.shelf["busybox"]
	img.Config.StopSignal = "SIGQUIT"
	b.shelf["quitter"] = &img
	s := b.sh("quitter", "trap 'echo quit; exit 5' QUIT; trap 'echo term; exit 6' TERM; echo up; while :; do sleep 0.05; done")
	s.Image = "quitter"
	b.start(s)
	b.says(s, "up")
	if err := b.Stop(t.Context(), s.ID, time.Minute); err != nil {
		t.Fatal(err)
	}
	if st := b.ended(s.ID); st.ExitCode != 5 {
		t.Errorf("ended %+v: %s", st, b.out(s))
	}
}

func TestTerminationMessage(t *testing.T) {
	b := newBench(t)
	s := b.sh("message", "printf 'the disk is full' > /dev/termination-log; exit 3")
	s.TerminationPath = "/dev/termination-log"
	b.start(s)
	if st := b.ended(s.ID); st.ExitCode != 3 || st.Message != "the disk is full" {
		t.Errorf("ended %+v", st)
	}
	s = b.sh("fallback", "echo one; echo two >&2; exit 3")
	s.TerminationPath, s.TerminationFallback = "/dev/termination-log", true
	b.start(s)
	if st := b.ended(s.ID); st.Message != "one\ntwo\n" {
		t.Errorf("ended %+v", st)
	}
}

// TestOutOfMemoryOfAChild: on control groups v1 the container lives on, and its
// later end is named by its own code; on v2 the kernel ends all of the group.
func TestOutOfMemoryOfAChild(t *testing.T) {
	b := newBench(t)
	f := b.cfg.Cgroups.Facts()
	if !f.Memory {
		t.Skip("SKIPPED: this machine has no memory controller")
	}
	code, reason := 4, "Error"
	if f.Mode == "v2" {
		code, reason = 137, "OOMKilled"
	}
	s := b.sh("child", "tail /dev/zero; echo child $?; exit 4")
	s.Resources.MemoryLimit = 32 << 20
	b.start(s)
	if st := b.ended(s.ID); st.ExitCode != code || st.Reason != reason {
		t.Errorf("ended %+v: %s", st, b.out(s))
	}
}

// TestMonitorKilled: without conmon nobody learns how a container ends: it
// is ended, and that is said.
func TestMonitorKilled(t *testing.T) {
	b := newBench(t)
	s := b.sh("orphan", "trap '' TERM PIPE; echo up; while :; do sleep 0.1; done")
	b.start(s)
	b.says(s, "up")
	var p started
	if err := readJSON(filepath.Join(b.folder(s.ID), startedFile), &p); err != nil {
		t.Fatal(err)
	}
	if err := unix.Kill(p.Monitor, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	select {
	case id := <-b.Exits():
		if id != s.ID {
			t.Errorf("hint of %v", id)
		}
	case <-t.Context().Done():
		t.Fatal("no hint")
	}
	st := b.ended(s.ID)
	if st.Reason != "MonitorLost" || st.ExitCode != 137 || !strings.Contains(st.Message, "conmon") {
		t.Errorf("ended %+v", st)
	}
	b.until("the end of the container", func() bool { return !process.Alive(p.PID, p.Start) })
}

// TestStateOfTheProgramIsDamaged: the OCI runtime can neither kill nor delete
// what it cannot read; the container ends and goes all the same.
func TestStateOfTheProgramIsDamaged(t *testing.T) {
	b := newBench(t)
	for name, damage := range map[string]int64{"empty": 0, "halved": 300} {
		s := b.sh(name, "trap '' TERM; echo up; while :; do sleep 0.1; done")
		b.start(s)
		b.says(s, "up")
		var p started
		if err := readJSON(filepath.Join(b.folder(s.ID), startedFile), &p); err != nil {
			t.Fatal(err)
		}
		state := filepath.Join(b.rootDir(), b.shortName(folderName(s.ID)))
		if err := os.Truncate(filepath.Join(state, "state.json"), damage); err != nil {
			t.Fatal(err)
		}
		if err := b.Remove(t.Context(), s.ID); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if process.Alive(p.PID, p.Start) || exists(state) || exists(b.folder(s.ID)) {
			t.Errorf("%s: alive %v, state there %v, folder there %v", name, process.Alive(p.PID, p.Start), exists(state), exists(b.folder(s.ID)))
		}
	}
}

// TestCreatedAndLost: an agent died after the container was created and
// before it was started: the next start makes it anew.
func TestCreatedAndLost(t *testing.T) {
	b := newBench(t)
	s := b.sh("lost", "echo up; sleep 1000")
	// What start does until then.
	rec := record{ID: s.ID, Digest: s.Digest, LogPath: s.LogPath, Cgroup: cgroupOf(s), Runtime: b.cfg.Programs.Runtime, Name: b.shortName(folderName(s.ID))}
	dir := b.folder(s.ID)
	for _, d := range []string{dir, filepath.Join(dir, exitDir), filepath.Dir(s.LogPath)} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := writeJSON(filepath.Join(dir, recordFile), rec); err != nil {
		t.Fatal(err)
	}
	img := b.shelf["busybox"]
	if err := mountRootfs(dir, b.upperDir(folderName(s.ID)), img); err != nil {
		t.Fatal(err)
	}
	pod, err := b.shared(t.Context(), s.ID.PodUID)
	if err != nil {
		t.Fatal(err)
	}
	bundle, err := b.bundle(s, img, dir, pod)
	if err != nil {
		t.Fatal(err)
	}
	if err := writeRaw(filepath.Join(dir, bundleFile), bundle); err != nil {
		t.Fatal(err)
	}
	pid, err := b.monitor(t.Context(), s, rec, dir)
	if err != nil {
		t.Fatal(err)
	}
	first, err := b.created(dir, pid)
	if err != nil {
		t.Fatal(err)
	}
	if st, ok, err := b.State(t.Context(), s.ID); err != nil || !ok || st.Phase != workload.Created {
		t.Fatalf("created: %+v %v %v", st, ok, err)
	}
	st := b.start(s)
	if st.Phase != workload.Running || st.PID == pid || process.Alive(first.PID, first.Start) {
		t.Errorf("made anew: %+v, first pid %d", st, pid)
	}
	b.says(s, "up")
}

// TestReboot: the run folder is what a boot leaves behind, the control
// groups and processes are not.
func TestReboot(t *testing.T) {
	b := newBench(t)
	s := b.sh("boot", "sleep 1000")
	b.start(s)
	var p started
	file := filepath.Join(b.folder(s.ID), startedFile)
	if err := readJSON(file, &p); err != nil {
		t.Fatal(err)
	}
	p.BootID = "another"
	if err := writeJSON(file, p); err != nil {
		t.Fatal(err)
	}
	st, ok, err := b.State(t.Context(), s.ID)
	if err != nil || !ok || st.Reason != "HostLost" || !strings.Contains(st.Message, "restarted") {
		t.Errorf("after a boot: %+v %v %v", st, ok, err)
	}
	if err := b.Remove(t.Context(), s.ID); err != nil {
		t.Fatal(err)
	}
	b.until("the end of the container", func() bool { return !process.Alive(p.PID, p.Start) })
	// With the run folder gone, what the container wrote goes too.
	left := b.upperDir("gone_app_0")
	if err := os.MkdirAll(left, 0o755); err != nil {
		t.Fatal(err)
	}
	if _, err := b.List(t.Context()); err != nil || exists(left) {
		t.Errorf("what an earlier boot left is still there (%v)", err)
	}
}

// TestRotation: what conmon replaced is kept under the name that the log's
// readers know.
func TestRotation(t *testing.T) {
	b := newBench(t)
	s := b.sh("rotate", "i=0; while :; do echo line $i; i=$((i+1)); sleep 0.01; done")
	s.LogMaxBytes = 4 << 10
	b.start(s)
	b.until("a rotated file", func() bool { return exists(s.LogPath + ".1") })
	old, err := os.ReadFile(s.LogPath + ".1")
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Contains(old, []byte("line 1\n")) || len(old) > 4<<10+200 {
		t.Errorf("rotated file of %d bytes: %.60s", len(old), old)
	}
}

// TestLimitsTooSmallToStart: whatever it is too small for, it is said of the
// limit, and nothing is left.
func TestLimitsTooSmallToStart(t *testing.T) {
	b := newBench(t)
	if !b.cfg.Cgroups.Facts().Memory {
		t.Skip("SKIPPED: this machine has no memory controller")
	}
	refused := 0
	for _, kib := range []int64{4, 64, 256, 512, 1024, 2048, 4096, 8192} {
		s := b.sh(fmt.Sprint("tight", kib), "echo ran")
		s.Resources.MemoryLimit = kib << 10
		_, err := b.Start(t.Context(), s)
		if err == nil {
			if st := b.ended(s.ID); st.Reason != "OOMKilled" && st.ExitCode != 0 {
				t.Errorf("%d KiB: %+v", kib, st)
			}
			continue
		}
		refused++
		var se *workload.StartError
		if !errors.As(err, &se) || se.Reason != "RunContainerError" || !strings.Contains(err.Error(), "the memory limit is too small to start") || strings.Contains(err.Error(), "\n") {
			t.Errorf("%d KiB: %v", kib, err)
		}
		if _, ok, err := b.State(t.Context(), s.ID); ok || err != nil {
			t.Errorf("%d KiB: left over: %v %v", kib, ok, err)
		}
	}
	if refused == 0 {
		t.Error("even the smallest was enough")
	}
}

// TestPropagation: of mounts made in a volume later on, a container sees those
// of the machine if it asks for them, the machine those of a container that may
// give them away, and nobody else's.
func TestPropagation(t *testing.T) {
	b := newBench(t)
	host := t.TempDir()
	for _, m := range []struct {
		fstype string
		flags  uintptr
	}{{"tmpfs", 0}, {"", unix.MS_SHARED}} {
		if err := unix.Mount("tmpfs", host, m.fstype, m.flags, ""); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		_ = unix.Unmount(filepath.Join(host, "own"), unix.MNT_DETACH)
		_ = unix.Unmount(filepath.Join(host, "later"), unix.MNT_DETACH)
		_ = unix.Unmount(host, unix.MNT_DETACH)
	})
	for _, d := range []string{"later", "own"} {
		if err := os.Mkdir(filepath.Join(host, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	const looks = "until test -e /vol/go; do sleep 0.05; done; test -e /vol/later/x && echo sees it"
	modes := map[string]string{"": looks, "rslave": looks, "rshared": "mount -t tmpfs none /vol/own && touch /vol/own/y; echo made; " + looks}
	specs := map[string]workload.Spec{}
	for mode, script := range modes {
		s := b.sh("p"+mode, script)
		s.Mounts = []workload.Mount{{Source: host, Target: "/vol", Propagation: mode}}
		s.Security.Privileged = mode == "rshared"
		b.start(s)
		specs[mode] = s
	}
	b.says(specs["rshared"], "made")
	later := filepath.Join(host, "later")
	if err := unix.Mount("tmpfs", later, "tmpfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	for _, f := range []string{filepath.Join(later, "x"), filepath.Join(host, "go")} {
		if err := os.WriteFile(f, nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for mode, s := range specs {
		b.ended(s.ID)
		if sees := strings.Contains(b.out(s), "sees it"); sees != (mode != "") {
			t.Errorf("%q sees the machine's mount: %v", mode, sees)
		}
	}
	if !exists(filepath.Join(host, "own", "y")) {
		t.Error("the machine does not see the mount of a container that shares")
	}
}

// What the node is short of is no end of the container.
func TestWhoseFaultARefusalIs(t *testing.T) {
	for text, ended := range map[string]bool{
		`runc create failed: unable to start container process: exec: "/no/such": stat /no/such: no such file or directory`:             true,
		"runc create failed: unable to start container process: exec /app: exec format error":                                           true,
		"container init was OOM-killed (memory limit too low?)":                                                                         true,
		"runc create failed: unable to start container process: error during container init: mkdir /proc/self: no space left on device": false,
		"crun: open `/proc/self/fd`: Too many open files: too many open files":                                                          false,
		"runc create failed: unable to start container process: clone: resource temporarily unavailable":                                false,
	} {
		var se *workload.StartError
		if err := createError(text); !errors.As(err, &se) || se.Ended != ended {
			t.Errorf("%s: %+v", text, err)
		}
	}
}
