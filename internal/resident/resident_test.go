package resident

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"
)

// The test's own program is copied, so that no other process maps the copy.
const child = "DUNLIN_TEST_RESIDENT"

func TestMain(m *testing.M) {
	if os.Getenv(child) != "" {
		before := fileKB()
		if err := Program(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		fmt.Println(before, fileKB()) //nolint:forbidigo // the child reports to its parent
		return
	}
	os.Exit(m.Run())
}

func TestWhenPagesAreGivenBack(t *testing.T) {
	var s schedule
	var at time.Duration
	files, reads := 30<<10, 0
	step := func(used time.Duration) bool {
		at += look
		return s.next(at, used, func() int { reads++; return files })
	}
	const busy, idle = time.Second, time.Millisecond
	for range 5 {
		if step(busy) {
			t.Fatal("while the start is not over")
		}
	}
	if !step(idle) {
		t.Fatal("not after the start")
	}
	given := at
	files = 10 << 10
	for at < given+pause {
		if step(idle) {
			t.Fatalf("again after %s, with nothing more in memory", at-given)
		}
	}
	if reads > 3 {
		t.Errorf("read %d times", reads)
	}
	files = many
	if step(busy) {
		t.Fatal("while there is work")
	}
	for i := 1; ; i++ {
		if step(idle) {
			if i < calm {
				t.Errorf("after %d looks of calm", i)
			}
			break
		}
		if i > 2*calm {
			t.Fatal("pages that came back stay")
		}
	}
	// Where they are in use, it is tried ever more rarely.
	given = at
	times := 0
	for at < given+24*time.Hour {
		if step(idle) {
			times++
		}
	}
	if times < 3 || times > 8 {
		t.Errorf("pages in use were given back %d times in a day", times)
	}
	// And as at first once they are few.
	files = 10 << 10
	for range int(longest/look) + 1 {
		step(idle)
	}
	files = many
	if !step(idle) {
		for range 2 * longest / look {
			if step(idle) {
				break
			}
		}
	}
	given, files = at, 10<<10
	for at < given+settled+look {
		step(idle)
	}
	files = many
	for !step(idle) {
		if at > given+2*pause {
			t.Fatal("pages that came back stay")
		}
	}
}

func TestPagesOfTheProgramGo(t *testing.T) {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	own := filepath.Join(t.TempDir(), "program")
	from, err := os.Open(exe)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = from.Close() }()
	to, err := os.OpenFile(own, os.O_CREATE|os.O_WRONLY, 0o700)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(to, from); err != nil {
		t.Fatal(err)
	}
	// Dirty pages of the copy could not be taken away.
	if err := to.Sync(); err != nil {
		t.Fatal(err)
	}
	if err := to.Close(); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(own)
	cmd.Env = append(os.Environ(), child+"=1")
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	var before, after int
	if _, err := fmt.Sscan(string(out), &before, &after); err != nil {
		t.Fatalf("%v: %q", err, out)
	}
	t.Logf("pages of files in memory: %d KiB before, %d KiB after", before, after)
	if before <= 0 || after <= 0 || after > before*3/4 {
		t.Errorf("pages of files in memory: %d KiB before, %d KiB after", before, after)
	}
}

func TestFileMapping(t *testing.T) {
	const file = "/usr/bin/my program"
	for line, want := range map[string]struct{ at, size uintptr }{
		"00400000-01648000 r-xp 00000000 fe:00 10281060                           /usr/bin/my program":    {0x400000, 0x1248000},
		"01648000-02911000 r--p 01248000 fe:00 10281060                           /usr/bin/my program":    {0x1648000, 0x12c9000},
		"02911000-029a8000 rw-p 02511000 fe:00 10281060                           /usr/bin/my program":    {},
		"00400000-01648000 r-xp 00000000 fe:00 10281060                           /usr/bin/no my program": {},
		"7fff0000-7fff1000 r-xp 00000000 00:00 0                                  [vdso]":                 {},
		"029a8000-049f7000 ---p 00000000 00:00 0":                                                         {},
		"zz-01648000 r-xp 0 fe:00 1 /usr/bin/my program":                                                  {},
		"2000-1000 r-xp 0 fe:00 1 /usr/bin/my program":                                                    {},
		"": {},
	} {
		if at, size := fileMapping(line, file); at != want.at || size != want.size {
			t.Errorf("%q: %#x, %#x", line, at, size)
		}
	}
}
