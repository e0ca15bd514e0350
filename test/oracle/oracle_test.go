package oracle

import (
	"bufio"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"sort"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/dunlin-project/dunlin/manifests"
)

// corpus reads the hand-written objects. Every served kind must be in it.
func corpus(t *testing.T) []manifests.Document {
	t.Helper()
	files, err := filepath.Glob("testdata/corpus/*.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var docs []manifests.Document
	kinds := map[string]bool{}
	for _, name := range files {
		f, err := os.Open(name)
		if err != nil {
			t.Fatal(err)
		}
		d, err := manifests.Decode(f, manifests.Options{File: name})
		_ = f.Close()
		if err != nil {
			t.Fatal(err)
		}
		docs = append(docs, d...)
		for _, one := range d {
			kinds[one.Kind.GVK.String()] = true
		}
	}
	for _, k := range manifests.Kinds() {
		if !kinds[k.GVK.String()] {
			t.Errorf("%s is not in the corpus", k.GVK)
		}
	}
	return docs
}

// mutate calls f with every object that differs from doc in one place: a
// value replaced by one that is wrong or unusual, a field removed, a list
// entry doubled.
func mutate(t *testing.T, doc manifests.Document, f func(what string, obj runtime.Object)) {
	t.Helper()
	var root any
	if err := json.Unmarshal(doc.JSON, &root); err != nil {
		t.Fatal(err)
	}
	try := func(what string) {
		raw, err := json.Marshal(root)
		if err != nil {
			t.Fatal(err)
		}
		obj := doc.Kind.New()
		if json.Unmarshal(raw, obj) == nil { // what does not fit the type never reaches us
			f(what, obj)
		}
	}
	var walk func(path string, v any, set func(any), remove func())
	walk = func(path string, v any, set func(any), remove func()) {
		if path == ".apiVersion" || path == ".kind" {
			return
		}
		for _, w := range replacements(v) {
			set(w)
			try(fmt.Sprintf("%s=%.40v", path, w))
		}
		set(v)
		if remove != nil {
			remove()
			try(path + " removed")
			set(v)
		}
		switch x := v.(type) {
		case map[string]any:
			for _, k := range sorted(x) {
				walk(path+"."+k, x[k], func(n any) { x[k] = n }, func() { delete(x, k) })
			}
			if strings.HasSuffix(path, "abels") || strings.HasSuffix(path, "nnotations") || strings.HasSuffix(path, "elector") ||
				strings.HasSuffix(path, "ata") || strings.HasSuffix(path, "imits") || strings.HasSuffix(path, "equests") || strings.HasSuffix(path, "ard") {
				for _, k := range []string{"-bad key-", "example.com/", "x", ".."} {
					x[k] = "1"
					try(path + " with " + k)
					delete(x, k)
				}
			}
		case []any:
			for i := range x {
				walk(fmt.Sprintf("%s[%d]", path, i), x[i], func(n any) { x[i] = n }, nil)
			}
			if len(x) > 0 {
				set(append(append([]any{}, x...), x[0]))
				try(path + " doubled")
				set(x)
			}
		}
	}
	walk("", root, func(any) {}, nil)
}

func sorted(m map[string]any) []string {
	var keys []string
	for k := range m {
		keys = append(keys, k)
	}
	sort.Strings(keys)
	return keys
}

func replacements(v any) []any {
	switch v.(type) {
	case string:
		return []any{"", "Bad_Value!", "-x", "x/y", "/abs/../up", "..", strings.Repeat("a", 300), "127.0.0.1", "None", "100m", "7"}
	case float64:
		return []any{-1, 0, 1, 2, 101, 70000, 1 << 31, "150%", "name"}
	case bool:
		return []any{true, false}
	}
	return nil
}

// fixup gives an object what the server would have set before validation.
func fixup(obj runtime.Object) metav1.Object {
	m := obj.(metav1.Object)
	m.SetUID(types.UID("0b0e8b1e-0000-4000-8000-000000000001"))
	m.SetResourceVersion("1")
	return m
}

// errorSet keys errors by what a client sees. Values that are structures
// print differently for internal types and are left out.
func errorSet(l field.ErrorList) map[string]bool {
	set := map[string]bool{}
	for _, e := range l {
		s := e.Error()
		v := reflect.ValueOf(e.BadValue)
		for v.Kind() == reflect.Pointer && !v.IsNil() {
			v = v.Elem()
		}
		switch v.Kind() {
		case reflect.Struct, reflect.Map, reflect.Slice:
			s = fmt.Sprintf("%s: %s: (structure): %s", e.Field, e.Type, e.Detail)
		}
		if strings.Contains(s, "pod updates may not change fields other than") || strings.Contains(s, "immutable after creation") {
			s, _, _ = strings.Cut(s, "\n") // the diff's form is ours
		}
		set[s] = true
	}
	return set
}

func compareErrors(ours, theirs field.ErrorList) []string {
	var diffs []string
	a, b := errorSet(ours), errorSet(theirs)
	for e := range a {
		if !b[e] {
			diffs = append(diffs, "ours only: "+e)
		}
	}
	for e := range b {
		if !a[e] {
			diffs = append(diffs, "upstream only: "+e)
		}
	}
	sort.Strings(diffs)
	return diffs
}

// compareObjects lists the JSON paths at which two objects differ.
func compareObjects(t *testing.T, ours, theirs runtime.Object) []string {
	t.Helper()
	tree := func(o runtime.Object) any {
		raw, err := json.Marshal(o)
		if err != nil {
			t.Fatal(err)
		}
		var v any
		if err := json.Unmarshal(raw, &v); err != nil {
			t.Fatal(err)
		}
		return prune(v)
	}
	var diffs []string
	var walk func(path string, a, b any)
	walk = func(path string, a, b any) {
		am, aok := a.(map[string]any)
		bm, bok := b.(map[string]any)
		if aok && bok {
			keys := map[string]any{}
			for k := range am {
				keys[k] = nil
			}
			for k := range bm {
				keys[k] = nil
			}
			for _, k := range sorted(keys) {
				walk(path+"."+k, am[k], bm[k])
			}
			return
		}
		al, aok := a.([]any)
		bl, bok := b.([]any)
		if aok && bok && len(al) == len(bl) {
			for i := range al {
				walk(fmt.Sprintf("%s[%d]", path, i), al[i], bl[i])
			}
			return
		}
		if !reflect.DeepEqual(a, b) {
			diffs = append(diffs, fmt.Sprintf("%s: ours %v, upstream %v", path, a, b))
		}
	}
	walk("", tree(ours), tree(theirs))
	return diffs
}

// prune drops empty maps and lists: to the API they are as absent.
func prune(v any) any {
	switch x := v.(type) {
	case map[string]any:
		for k, e := range x {
			if e = prune(e); e == nil {
				delete(x, k)
			} else {
				x[k] = e
			}
		}
		if len(x) == 0 {
			return nil
		}
	case []any:
		for i := range x {
			x[i] = prune(x[i])
		}
		if len(x) == 0 {
			return nil
		}
	}
	return v
}

func TestAgainstUpstream(t *testing.T) {
	allow := sharedAllowed(t)
	cases, faults := 0, map[string]int{}
	index, quoted := regexp.MustCompile(`\[[^\]]*\]`), regexp.MustCompile(`"[^"]*"`)
	report := func(kind, what, check string, diffs []string) {
		for _, d := range diffs {
			line := fmt.Sprintf("%s %s: %s", kind, check, d)
			if allow.covers(line) {
				continue
			}
			// One example of each form of difference is enough to read.
			form := quoted.ReplaceAllString(index.ReplaceAllString(line, "[]"), "")
			if faults[form]++; faults[form] == 1 {
				t.Errorf("%.400s  [%s]", line, what)
			}
		}
	}
	for _, doc := range corpus(t) {
		kind := doc.Kind.GVK.Kind
		if doc.Kind.GVK.Group == "events.k8s.io" {
			kind = "events." + kind
		}
		_, oldInternal, err := upstreamDefault(doc.Object)
		if err != nil {
			t.Fatal(err)
		}
		old := doc.Object.DeepCopyObject()
		manifests.Default(old)
		fixup(old)
		fixup(oldInternal)
		one := func(what string, obj runtime.Object) {
			cases++
			ours := obj.DeepCopyObject()
			manifests.Default(ours)
			stored, internal, err := upstreamDefault(obj)
			if err != nil {
				return
			}
			report(kind, what, "defaults", compareObjects(t, ours, stored))
			// Validation is compared on upstream's defaulted form, so that one
			// difference is not reported twice.
			report(kind, what, "create", compareErrors(manifests.Validate(stored), upstreamValidate(obj, internal, nil)))
			if reflect.DeepEqual(obj, doc.Object) {
				return
			}
			// Name and namespace are the request's; they cannot differ here.
			for _, o := range []runtime.Object{stored, internal} {
				m, was := fixup(o), old.(metav1.Object)
				m.SetName(was.GetName())
				m.SetNamespace(was.GetNamespace())
			}
			report(kind, what, "update", compareErrors(manifests.ValidateUpdate(stored, old), upstreamValidate(obj, internal, oldInternal.DeepCopyObject())))
		}
		one("as written", doc.Object)
		mutate(t, doc, one)
	}
	t.Logf("%d objects compared", cases)
	allow.users++
}

// TestQOSAndPullPolicyAgainstUpstream would need upstream's kubelet; what the
// API shows of both is in TestAgainstUpstream. Random images are compared
// here, since the rule for the tag is a grammar of its own.
func TestPullPolicyOfRandomImages(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	parts := []string{"a", "lib", "reg.io", "Reg.IO", "localhost", ":", ":", "/", "/", "@", "latest", "v1.2", "5000", "sha256", "_", "__", "-", ".", "A", " ",
		"[::1]", "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef", "file://", ".wasm", ""}
	for range 50_000 {
		image := ""
		for range 1 + r.IntN(8) {
			image += parts[r.IntN(len(parts))]
		}
		pod := &corev1.Pod{Spec: corev1.PodSpec{Containers: []corev1.Container{{Image: image}}}}
		ours := pod.DeepCopy()
		manifests.Default(ours)
		theirs, _, err := upstreamDefault(pod)
		if err != nil {
			t.Fatal(err)
		}
		if a, b := ours.Spec.Containers[0].ImagePullPolicy, theirs.(*corev1.Pod).Spec.Containers[0].ImagePullPolicy; a != b {
			t.Errorf("%q: ours %s, upstream %s", image, a, b)
		}
	}
}

// allowed is the list of differences that are meant.
type allowed struct {
	lines []*allowedLine
	users int // tests that went through
}

var shared *allowed

func sharedAllowed(t *testing.T) *allowed {
	t.Helper()
	if shared == nil {
		shared = readAllowed(t)
	}
	return shared
}

type allowedLine struct {
	pattern *regexp.Regexp
	text    string
	used    bool
}

// readAllowed reads lines "regular expression<TAB>reason".
func readAllowed(t *testing.T) *allowed {
	t.Helper()
	f, err := os.Open("testdata/allowed.txt")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close() //nolint:errcheck // read only
	a := &allowed{}
	s := bufio.NewScanner(f)
	for s.Scan() {
		line := s.Text()
		if line == "" || line[0] == '#' {
			continue
		}
		pattern, reason, ok := strings.Cut(line, "\t")
		if !ok || strings.TrimSpace(reason) == "" {
			t.Fatalf("allowed.txt: %q has no reason", line)
		}
		a.lines = append(a.lines, &allowedLine{pattern: regexp.MustCompile("^" + pattern), text: pattern})
	}
	if err := s.Err(); err != nil {
		t.Fatal(err)
	}
	return a
}

func (a *allowed) covers(line string) bool {
	for _, l := range a.lines {
		if l.pattern.MatchString(line) {
			l.used = true
			return true
		}
	}
	return false
}
