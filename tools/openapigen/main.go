// Command openapigen makes the file that package openapi embeds: the
// structure of every schema that is reachable from a served kind, as one
// merged map, without descriptions (those come from the Go types at run
// time), gzipped.
//
// It reads api/openapi-spec/v3/*.json of the module k8s.io/kubernetes
// (Apache-2.0), which the go command downloads. Run it after a change of the
// kinds table or of the Kubernetes version:
//
//	cd tools/openapigen && go run .
package main

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"

	"github.com/dunlin-project/dunlin/controlplane/api/discovery"
)

func main() {
	out := flag.String("out", "../../controlplane/api/openapi/schemas.json.gz", "file to write")
	src := flag.String("src", "", "folder with the v3 documents; empty downloads k8s.io/kubernetes@v"+discovery.KubernetesVersion)
	flag.Parse()
	if err := run(*src, *out); err != nil {
		fmt.Fprintln(os.Stderr, "openapigen:", err)
		os.Exit(1)
	}
}

func run(src, out string) error {
	if src == "" {
		dir, err := moduleDir("k8s.io/kubernetes@v" + discovery.KubernetesVersion)
		if err != nil {
			return err
		}
		src = filepath.Join(dir, "api", "openapi-spec", "v3")
	}
	all, err := readSchemas(src)
	if err != nil {
		return err
	}
	keep, err := reachable(all, roots(all))
	if err != nil {
		return err
	}
	served := map[string]bool{}
	for _, r := range discovery.Resources(everything) {
		served[r.GroupVersion.Group+"/"+r.GroupVersion.Version] = true
		served[r.Kind.Group+"/"+r.Kind.Version] = true
	}
	merged := map[string]any{}
	for _, name := range keep {
		strip(all[name])
		onlyServed(all[name], served)
		merged[name] = all[name]
	}
	raw, err := json.Marshal(merged) // sorts keys: the file is reproducible
	if err != nil {
		return err
	}
	var buf bytes.Buffer
	zw, err := gzip.NewWriterLevel(&buf, gzip.BestCompression)
	if err != nil {
		return err
	}
	if _, err := zw.Write(raw); err != nil {
		return err
	}
	if err := zw.Close(); err != nil {
		return err
	}
	if err := os.WriteFile(out, buf.Bytes(), 0o644); err != nil {
		return err
	}
	fmt.Fprintf(os.Stdout, "%d schemas, %d bytes, %d compressed: %s\n", len(merged), len(raw), buf.Len(), out)
	return nil
}

// moduleDir downloads a module and returns its folder.
func moduleDir(module string) (string, error) {
	cmd := exec.Command("go", "mod", "download", "-json", module)
	cmd.Dir = os.TempDir() // outside of any module: nobody's go.mod is touched
	b, err := cmd.Output()
	if err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			err = fmt.Errorf("%w: %s%s", err, b, exit.Stderr)
		}
		return "", fmt.Errorf("download %s: %w", module, err)
	}
	var m struct{ Dir string }
	if err := json.Unmarshal(b, &m); err != nil {
		return "", fmt.Errorf("download %s: %w", module, err)
	}
	return m.Dir, nil
}

// readSchemas merges components.schemas of every document. The same name
// must mean the same thing everywhere.
func readSchemas(dir string) (map[string]map[string]any, error) {
	files, err := filepath.Glob(filepath.Join(dir, "*.json"))
	if err != nil {
		return nil, err
	}
	if len(files) == 0 {
		return nil, fmt.Errorf("no documents in %s", dir)
	}
	all := map[string]map[string]any{}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			return nil, err
		}
		var doc struct {
			Components struct {
				Schemas map[string]map[string]any `json:"schemas"`
			} `json:"components"`
		}
		if err := json.Unmarshal(b, &doc); err != nil {
			return nil, fmt.Errorf("%s: %w", f, err)
		}
		for name, s := range doc.Components.Schemas {
			if have, ok := all[name]; ok {
				mergeKinds(have, s)
				if !reflect.DeepEqual(have, s) {
					return nil, fmt.Errorf("%s: %s differs from the same schema elsewhere", f, name)
				}
			}
			all[name] = s
		}
	}
	return all, nil
}

const kindsKey = "x-kubernetes-group-version-kind"

// mergeKinds gives both the union of their kinds: DeleteOptions and
// WatchEvent are listed under the groups of the document that they stand in.
func mergeKinds(a, b map[string]any) {
	la, _ := a[kindsKey].([]any)
	lb, _ := b[kindsKey].([]any)
	union := slices.Clone(la)
	for _, e := range lb {
		if !slices.ContainsFunc(union, func(o any) bool { return reflect.DeepEqual(o, e) }) {
			union = append(union, e)
		}
	}
	if len(union) > 0 {
		a[kindsKey], b[kindsKey] = union, union
	}
}

// onlyServed drops the kinds of groups that are not served.
func onlyServed(s map[string]any, groups map[string]bool) {
	list, ok := s[kindsKey].([]any)
	if !ok {
		return
	}
	s[kindsKey] = slices.DeleteFunc(slices.Clone(list), func(e any) bool {
		m, _ := e.(map[string]any)
		group, _ := m["group"].(string)
		version, _ := m["version"].(string)
		return !groups[group+"/"+version]
	})
}

// always are schemas that no kind refers to and every client may need.
var always = []string{
	"io.k8s.apimachinery.pkg.apis.meta.v1.DeleteOptions",
	"io.k8s.apimachinery.pkg.apis.meta.v1.Patch",
	"io.k8s.apimachinery.pkg.apis.meta.v1.Status",
	"io.k8s.apimachinery.pkg.apis.meta.v1.WatchEvent",
}

var everything = discovery.Features{Streams: true, EphemeralContainers: true, Resize: true}

type gvk struct{ group, version, kind string }

// roots are the schemas of everything that is served, and of its lists.
func roots(all map[string]map[string]any) []string {
	want := map[gvk]bool{}
	for _, r := range discovery.Resources(everything) {
		want[gvk{r.Kind.Group, r.Kind.Version, r.Kind.Kind}] = true
		if r.Stored {
			want[gvk{r.Kind.Group, r.Kind.Version, r.Kind.Kind + "List"}] = true
		}
	}
	list := slices.Clone(always)
	for _, name := range slices.Sorted(maps.Keys(all)) {
		for _, g := range kindsOf(all[name]) {
			if want[g] {
				list = append(list, name)
				delete(want, g)
			}
		}
	}
	for g := range want {
		// The options of streams are parameters, not bodies.
		if !strings.HasSuffix(g.kind, "Options") {
			fmt.Fprintf(os.Stderr, "openapigen: no schema for %s/%s %s\n", g.group, g.version, g.kind)
		}
	}
	return list
}

func kindsOf(s map[string]any) []gvk {
	list, _ := s[kindsKey].([]any)
	var out []gvk
	for _, e := range list {
		m, _ := e.(map[string]any)
		group, _ := m["group"].(string)
		version, _ := m["version"].(string)
		kind, _ := m["kind"].(string)
		out = append(out, gvk{group, version, kind})
	}
	return out
}

// reachable follows references.
func reachable(all map[string]map[string]any, from []string) ([]string, error) {
	seen := map[string]bool{}
	var visit func(name string) error
	var walk func(v any) error
	walk = func(v any) error {
		switch v := v.(type) {
		case map[string]any:
			if ref, ok := v["$ref"].(string); ok {
				if err := visit(strings.TrimPrefix(ref, "#/components/schemas/")); err != nil {
					return err
				}
			}
			for _, e := range v {
				if err := walk(e); err != nil {
					return err
				}
			}
		case []any:
			for _, e := range v {
				if err := walk(e); err != nil {
					return err
				}
			}
		}
		return nil
	}
	visit = func(name string) error {
		if seen[name] {
			return nil
		}
		s, ok := all[name]
		if !ok {
			return fmt.Errorf("no schema %s", name)
		}
		seen[name] = true
		return walk(map[string]any(s))
	}
	for _, name := range from {
		if err := visit(name); err != nil {
			return nil, err
		}
	}
	return slices.Sorted(maps.Keys(seen)), nil
}

// strip removes descriptions, and only those: a property may be called
// description.
func strip(s map[string]any) {
	delete(s, "description")
	if props, ok := s["properties"].(map[string]any); ok {
		for _, p := range props {
			if m, ok := p.(map[string]any); ok {
				strip(m)
			}
		}
	}
	for _, key := range []string{"items", "additionalProperties", "not"} {
		if m, ok := s[key].(map[string]any); ok {
			strip(m)
		}
	}
	for _, key := range []string{"allOf", "anyOf", "oneOf"} {
		if list, ok := s[key].([]any); ok {
			for _, e := range list {
				if m, ok := e.(map[string]any); ok {
					strip(m)
				}
			}
		}
	}
}
