package cli

import (
	"context"
	"fmt"
	"io/fs"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/dunlin-project/dunlin/cli/client"
	"github.com/dunlin-project/dunlin/manifests"
)

type applyOptions struct {
	files  []string
	dryRun bool
	force  bool
	output string
}

func (a *app) applyCmd() *cobra.Command {
	var o applyOptions
	c := &cobra.Command{
		Use:   "apply -f FILE...",
		Short: "Create or change objects as the manifests say",
		Long: `Create or change objects as the manifests say.

Files are checked strictly before anything is sent: unknown and duplicate
fields, wrong units and wrong kinds are errors with file and line. The server
merges (server-side apply, field manager "dunlin").`,
		Example: `  dunlin apply -f examples/hello/
  cat app.yaml | dunlin apply -f -
  dunlin apply -f app.yaml --dry-run`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return a.apply(cmd.Context(), o) },
	}
	c.Flags().StringArrayVarP(&o.files, "filename", "f", nil, "file, folder or - (standard input); may be given several times")
	c.Flags().BoolVar(&o.dryRun, "dry-run", false, "let the server check it all, and change nothing")
	c.Flags().BoolVar(&o.force, "force-conflicts", false, "take over fields that another manager owns")
	c.Flags().StringVarP(&o.output, "output", "o", "", "print the result as yaml, json or name")
	return a.namespaced(c)
}

// manifest is one object of a file.
type manifest struct {
	source          string // for messages: file and line
	gvk             schema.GroupVersionKind
	namespace, name string
	json            []byte
}

func (m manifest) namespaceOr(def string) string {
	if m.namespace != "" {
		return m.namespace
	}
	return def
}

// readManifests reads all files before anything is sent: one fault and
// nothing is changed.
func (a *app) readManifests(files []string) ([]manifest, error) {
	if len(files) == 0 {
		return nil, usagef("give at least one file with -f (a folder and - for standard input work too)")
	}
	var out []manifest
	for _, f := range files {
		names, err := expand(f)
		if err != nil {
			return nil, err
		}
		for _, name := range names {
			ms, err := a.readManifest(name)
			if err != nil {
				return nil, err
			}
			out = append(out, ms...)
		}
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("no objects in %s", strings.Join(files, ", "))
	}
	return out, nil
}

func expand(f string) ([]string, error) {
	if f == "-" {
		return []string{f}, nil
	}
	info, err := os.Stat(f)
	if err != nil {
		return nil, fmt.Errorf("read manifest: %w", err)
	}
	if !info.IsDir() {
		return []string{f}, nil
	}
	var out []string
	entries, err := os.ReadDir(f)
	if err != nil {
		return nil, fmt.Errorf("read folder: %w", err)
	}
	for _, e := range entries {
		if e.Type()&fs.ModeDir == 0 && slices.Contains([]string{".yaml", ".yml", ".json"}, filepath.Ext(e.Name())) {
			out = append(out, filepath.Join(f, e.Name()))
		}
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("folder %s holds no .yaml, .yml or .json file", f)
	}
	return out, nil
}

func (a *app) readManifest(name string) ([]manifest, error) {
	in := a.in
	if name != "-" {
		f, err := os.Open(name)
		if err != nil {
			return nil, fmt.Errorf("read manifest: %w", err)
		}
		defer func() { _ = f.Close() }()
		in = f
	} else {
		name = "standard input"
	}
	docs, err := manifests.Decode(in, manifests.Options{File: name})
	if err != nil {
		return nil, err
	}
	var out []manifest
	for _, d := range docs {
		acc, err := meta.Accessor(d.Object)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		out = append(out, manifest{
			source: fmt.Sprintf("%s:%d", name, d.Line), gvk: d.Kind.GVK,
			namespace: acc.GetNamespace(), name: acc.GetName(), json: d.JSON,
		})
	}
	return out, nil
}

func (a *app) apply(ctx context.Context, o applyOptions) error {
	if o.output != "" && o.output != "name" && o.output != "yaml" && o.output != "json" {
		return usagef("output format %q: yaml, json and name are known", o.output)
	}
	docs, err := a.readManifests(o.files)
	if err != nil {
		return err
	}
	c, err := a.client()
	if err != nil {
		return err
	}
	all, err := c.Resources(ctx)
	if err != nil {
		return err
	}
	for _, d := range docs {
		r, err := client.ByKind(all, d.gvk)
		if err != nil {
			return fmt.Errorf("%s: %w", d.source, err)
		}
		if d.name == "" {
			return fmt.Errorf("%s: metadata.name is missing (apply needs a name)", d.source)
		}
		if err := a.applyOne(ctx, c, r, d, o); err != nil {
			return fmt.Errorf("%s: %w", d.source, err)
		}
	}
	return nil
}

func (a *app) applyOne(ctx context.Context, c *client.Client, r client.Resource, d manifest, o applyOptions) error {
	path := r.Path(d.namespaceOr(c.Namespace), d.name)
	before, err := c.Object(ctx, path)
	if err != nil && !client.IsNotFound(err) {
		return err
	}
	q := url.Values{"fieldManager": {"dunlin"}, "fieldValidation": {"Strict"}, "force": {strconv.FormatBool(o.force)}}
	if o.dryRun {
		q.Set("dryRun", "All")
	}
	after := &unstructured.Unstructured{}
	err = c.JSON(ctx, client.Request{Method: http.MethodPatch, Path: path, Query: q, ContentType: "application/apply-patch+yaml", Body: d.json}, &after.Object)
	if client.IsConflict(err) {
		return fmt.Errorf("%w\n(another manager owns these fields; --force-conflicts takes them over)", err)
	}
	if err != nil {
		return err
	}
	switch o.output {
	case "name":
		a.printf("%s/%s\n", r, d.name)
		return nil
	case "yaml", "json":
		return a.marshal(after.Object, o.output)
	}
	verb := "configured"
	switch {
	case before == nil:
		verb = "created"
	case sameButBookkeeping(before, after):
		verb = "unchanged"
	}
	if o.dryRun {
		verb += " (dry run)"
	}
	a.printf("%s/%s %s\n", r, d.name, verb)
	return nil
}

// sameButBookkeeping compares without what every write may touch.
func sameButBookkeeping(x, y *unstructured.Unstructured) bool {
	x, y = x.DeepCopy(), y.DeepCopy()
	for _, u := range []*unstructured.Unstructured{x, y} {
		u.SetManagedFields(nil)
		u.SetResourceVersion("")
		unstructured.RemoveNestedField(u.Object, "status")
	}
	return equality.Semantic.DeepEqual(x.Object, y.Object)
}
