package host

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/tetratelabs/wazero"
	"github.com/tetratelabs/wazero/experimental/sys"
)

func testModule(t *testing.T, name string) []byte {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("..", "testdata", name+".wasm"))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// runGuest runs a module in this process.
func runGuest(t *testing.T, name string, change func(*Guest)) (string, Outcome) {
	t.Helper()
	var out bytes.Buffer
	g := &Guest{Module: testModule(t, name), Args: []string{name}, Stdout: &out, Stderr: &out}
	if change != nil {
		change(g)
	}
	p, err := Wazero{}.Load(context.Background(), g)
	if err != nil {
		t.Fatal(err)
	}
	o := p.Run(context.Background())
	return out.String(), o
}

// The engine's defaults are a clock that stands still, a sleep that returns
// at once, and the same random bytes every time. Guests get the real ones.
func TestClocksSleepAndRandom(t *testing.T) {
	before := time.Now()
	first, o := runGuest(t, "clock", nil)
	second, _ := runGuest(t, "clock", nil)
	after := time.Now()
	if len(first) != 40 || len(second) != 40 || o.ExitCode != 0 {
		t.Fatalf("%d %d %+v", len(first), len(second), o)
	}
	word := func(s string, i int) int64 { return int64(binary.LittleEndian.Uint64([]byte(s[8*i:]))) }
	if at := word(first, 0); at < before.UnixNano() || at > after.UnixNano() {
		t.Errorf("wall clock %v, now is %v", time.Unix(0, at), before)
	}
	if slept := time.Duration(word(first, 2) - word(first, 1)); slept < 50*time.Millisecond {
		t.Errorf("a sleep of 50 ms took %s", slept)
	}
	if first[24:] == second[24:] {
		t.Error("the same random bytes twice")
	}
}

func TestArgumentsAndEnvironment(t *testing.T) {
	out, _ := runGuest(t, "environ", func(g *Guest) {
		g.Args = []string{"app", "-v"}
		g.Env = []string{"A=1", "A=2", "=bad", "E="}
		g.Listeners, g.Sockets = []Listener{{Name: "http"}, {Name: "grpc"}}, [][]int{{}, {}}
	})
	for _, want := range []string{"app\x00-v\x00", "A=2\x00", "E=\x00", "LISTEN_FDS=2\x00", "LISTEN_FDNAMES=http:grpc\x00", "DUNLIN_LISTEN_FD=3\x00"} {
		if !strings.Contains(out, want) {
			t.Errorf("%q misses %q", out, want)
		}
	}
	if strings.Contains(out, "A=1") {
		t.Errorf("an overridden value: %q", out)
	}
}

func TestMemoryLimit(t *testing.T) {
	_, o := runGuest(t, "grow", func(g *Guest) { g.MemoryLimit = 4 << 20 })
	if o.ExitCode != 9 || !o.MemoryRefused || o.MemoryPeak != 4<<20 {
		t.Errorf("%+v", o)
	}
	_, msg := explain(o, 4<<20, "")
	if !strings.Contains(msg, "it asked for more than its memory limit of 4Mi (it had 4Mi)") {
		t.Errorf("%q", msg)
	}
	g := &Guest{Module: testModule(t, "bigmemory"), MemoryLimit: 64 << 20, Stdout: &bytes.Buffer{}, Stderr: &bytes.Buffer{}}
	if _, err := (Wazero{}).Load(context.Background(), g); !errors.Is(err, errMinimumMemory) {
		t.Errorf("128 MiB at start under 64 MiB: %v", err)
	}
}

func TestWASIIsWhole(t *testing.T) {
	r := wazero.NewRuntime(context.Background())
	defer func() { _ = r.Close(context.Background()) }()
	w, err := newWASITable(context.Background(), r)
	if err != nil {
		t.Fatal(err)
	}
	newSockets().override(w)
	if len(w.fns) != 46 {
		t.Errorf("%d functions", len(w.fns))
	}
}

func testLog(t *testing.T, maxBytes int64, maxFiles int) (*criLog, string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "0.log")
	l, err := openLog(path, maxBytes, maxFiles)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(l.close)
	l.now = func() time.Time { return time.Unix(1700000000, 5).UTC() }
	return l, path
}

func TestLogFormat(t *testing.T) {
	l, path := testLog(t, 1<<20, 2)
	out, errs := &stream{log: l, name: "stdout"}, &stream{log: l, name: "stderr"}
	for _, w := range []struct {
		s    *stream
		text string
	}{{out, "one\ntw"}, {errs, "oops\n"}, {out, "o\n\n"}, {out, strings.Repeat("x", maxLine+3) + "\n"}, {out, "end"}} {
		if n, err := w.s.Write([]byte(w.text)); n != len(w.text) || err != nil {
			t.Fatal(n, err)
		}
	}
	out.finish()
	got, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	const at = "2023-11-14T22:13:20.000000005Z "
	want := at + "stdout F one\n" + at + "stderr F oops\n" + at + "stdout F two\n" + at + "stdout F \n" +
		at + "stdout P " + strings.Repeat("x", maxLine) + "\n" + at + "stdout F xxx\n" + at + "stdout F end\n"
	if string(got) != want {
		t.Errorf("log\n%.600q\nwant\n%.600q", got, want)
	}
}

func TestLogRotation(t *testing.T) {
	l, path := testLog(t, 1000, 3)
	s := &stream{log: l, name: "stdout"}
	for i := range 200 {
		_, _ = fmt.Fprintf(s, "line %d\n", i)
	}
	files, err := filepath.Glob(path + "*")
	if err != nil || len(files) != 3 {
		t.Fatalf("%v %v", files, err)
	}
	var all strings.Builder
	for _, f := range []string{path + ".2", path + ".1", path} {
		b, err := os.ReadFile(f)
		if err != nil || len(b) > 1000 {
			t.Errorf("%s: %d bytes, %v", f, len(b), err)
		}
		all.Write(b)
	}
	lines := strings.Split(strings.TrimSpace(all.String()), "\n")
	for i, line := range lines {
		if want := fmt.Sprintf(" line %d", 200-len(lines)+i); !strings.HasSuffix(line, want) {
			t.Fatalf("line %d is %q, want %q", i, line, want)
		}
	}
}

func TestTail(t *testing.T) {
	k := &tail{max: 16}
	k.add([]byte("first line\nsecond"))
	k.add([]byte(" line\n"))
	if got := k.text(); got != "second line" {
		t.Errorf("%q", got)
	}
	k.add(bytes.Repeat([]byte("z"), 100))
	if got := k.text(); got != strings.Repeat("z", 16) {
		t.Errorf("%q", got)
	}
}

// A guest cannot leave its folder: not by .., not by links that others made,
// and it can make none.
func TestMountsHold(t *testing.T) {
	dir := t.TempDir()
	inside := filepath.Join(dir, "volume")
	secret := filepath.Join(dir, "secret")
	if err := errors.Join(os.Mkdir(inside, 0o755), os.WriteFile(secret, []byte("no"), 0o644),
		os.Symlink("../secret", filepath.Join(inside, "up")), os.Symlink("/etc", filepath.Join(inside, "abs")),
		os.WriteFile(filepath.Join(inside, "real"), []byte("yes"), 0o644), os.Symlink("real", filepath.Join(inside, "link"))); err != nil {
		t.Fatal(err)
	}
	mounts, err := openMounts([]Mount{
		{Source: inside, Target: "/data"}, {Source: inside, Target: "/ro", ReadOnly: true},
		{Source: secret, Target: "/etc/app/key", ReadOnly: true},
	})
	if err != nil || len(mounts) != 3 || mounts[1].path != "/etc/app" {
		t.Fatalf("%+v %v", mounts, err)
	}
	rw, single, ro := mounts[0].fs, mounts[1].fs, mounts[2].fs
	for _, p := range []string{"../secret", "up", "abs/passwd"} {
		if _, errno := rw.OpenFile(p, sys.O_RDONLY, 0); errno == 0 {
			t.Errorf("%s was opened", p)
		}
		if _, errno := rw.Stat(p); errno == 0 {
			t.Errorf("%s was seen", p)
		}
	}
	read := func(fs *rootFS, p string) string {
		f, errno := fs.OpenFile(p, sys.O_RDONLY, 0)
		if errno != 0 {
			t.Errorf("%s: %v", p, errno)
			return ""
		}
		buf := make([]byte, 10)
		n, _ := f.Read(buf)
		if errno := f.Close(); errno != 0 {
			t.Error(errno)
		}
		return string(buf[:n])
	}
	if got := read(rw, "link"); got != "yes" {
		t.Errorf("%q", got)
	}
	if got := read(single, "key"); got != "no" {
		t.Errorf("%q", got)
	}
	if rw.Symlink("/", "x") == 0 || rw.Link("real", "y") == 0 {
		t.Error("a link was made")
	}
	if _, errno := single.OpenFile("../volume/real", sys.O_RDONLY, 0); errno == 0 {
		t.Error("a single file leads to others")
	}
	for what, errno := range map[string]sys.Errno{
		"create": second(ro.OpenFile("new", sys.O_CREAT|sys.O_WRONLY, 0o600)), "truncate": second(ro.OpenFile("real", sys.O_TRUNC|sys.O_RDWR, 0)),
		"mkdir": ro.Mkdir("d", 0o700), "unlink": ro.Unlink("real"), "rename": ro.Rename("real", "other"), "chmod": ro.Chmod("real", 0),
	} {
		if errno != sys.EROFS {
			t.Errorf("%s in a read-only mount: %v", what, errno)
		}
	}
	f, errno := rw.OpenFile("new", sys.O_CREAT|sys.O_RDWR, 0o600)
	if errno != 0 {
		t.Fatal(errno)
	}
	if n, errno := f.Write([]byte("text")); n != 4 || errno != 0 {
		t.Error(n, errno)
	}
	if errno := f.Close(); errno != 0 {
		t.Error(errno)
	}
	if rw.Rmdir("new") != sys.ENOTDIR || rw.Unlink("new") != 0 {
		t.Error("rmdir and unlink")
	}
}

func second(_ sys.File, e sys.Errno) sys.Errno { return e }

func TestExplainTrap(t *testing.T) {
	got := explainTrap(errors.New("wasm error: unreachable\nwasm stack trace:\n\t.main.inner(i32) i32\n\t\t0x1: /x.go:3:1\n\t.main.outer()\n\t.$3()"))
	if got != "unreachable in main.inner <- main.outer <- $3" {
		t.Errorf("%q", got)
	}
}

func FuzzReadSpec(f *testing.F) {
	f.Add([]byte(`{"name":"x","sockets":[0],"listeners":[{"name":"a","port":1}]}`))
	f.Add([]byte(`{"sockets":[-1]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := ReadSpec(bytes.NewReader(b))
		if err != nil {
			return
		}
		for _, i := range s.Sockets {
			if i < 0 || i >= len(s.Listeners) {
				t.Errorf("socket %d of %d listeners", i, len(s.Listeners))
			}
		}
	})
}

// TestWrongSignaturesAreRefusedBeforeTheyRun: a module that could never be
// linked is not compiled.
func TestWrongSignaturesAreRefusedBeforeTheyRun(t *testing.T) {
	importing := func(name string) []byte {
		b := []byte("\x00asm\x01\x00\x00\x00" + "\x01\x04\x01\x60\x00\x00" + "\x02")
		body := "\x01\x16wasi_snapshot_preview1" + string(rune(len(name))) + name + "\x00\x00"
		return append(b, string(rune(len(body)))+body...)
	}
	for name, want := range map[string]string{
		"fd_write":  "the module imports fd_write() -> (), which is (i32 i32 i32 i32) -> (i32)",
		"sock_open": "sock_open() -> (), which no known form of it is",
	} {
		if err := (Wazero{}).Compile(t.Context(), importing(name), t.TempDir()); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := (Wazero{}).Compile(t.Context(), testModule(t, "print"), t.TempDir()); err != nil {
		t.Error(err)
	}
}
