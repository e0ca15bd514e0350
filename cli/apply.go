package cli

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/dunlin-project/dunlin/cli/client"
	"github.com/dunlin-project/dunlin/manifests"
)

type applyOptions struct {
	files  []string
	dryRun dryRun
	force  bool
	output string
}

func (a *app) applyCmd() *cobra.Command {
	o := applyOptions{dryRun: dryRunNone}
	c := &cobra.Command{
		Use:   "apply -f FILE...",
		Short: "Create or change objects as the manifests say",
		Long: `Create or change objects as the manifests say.

Files are checked strictly before anything is sent: unknown and duplicate
fields, wrong units and wrong kinds are errors with file and line. The server
merges (server-side apply, field manager "dunlin"). It looks at all objects first:
if one of them is invalid, nothing is changed. Another reason to refuse one (its
namespace is missing, a quota) does not keep the others from being applied; the
exit code is then 1.`,
		Example: `  dunlin apply -f examples/hello/
  cat app.yaml | dunlin apply -f -
  dunlin apply -f app.yaml --dry-run`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return a.apply(cmd.Context(), o) },
	}
	c.Flags().StringArrayVarP(&o.files, "filename", "f", nil, "file, folder or - (standard input); may be given several times")
	c.Flags().Var(&o.dryRun, "dry-run", "change nothing: `server` lets the server check it all (also without a value), client checks what can be without one")
	c.Flags().Lookup("dry-run").NoOptDefVal = string(dryRunServer)
	c.Flags().BoolVar(&o.force, "force-conflicts", false, "take over fields that another manager owns")
	c.Flags().StringVarP(&o.output, "output", "o", "", "print the result as yaml, json or name")
	return a.namespaced(c)
}

// manifest is one object of a file.
type manifest struct {
	source, file    string // for messages: file and line; file
	gvk             schema.GroupVersionKind
	namespace, name string
	json            []byte
	object          runtime.Object
	place           func(field string) (line int) // of a field, or of what should have it
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
		return nil, usagef("give at least one file with -f (a folder and - for standard input work too); example: dunlin apply -f app.yaml")
	}
	var out []manifest
	var bad []error
	for _, f := range files {
		names, err := expand(f)
		if err != nil {
			bad = append(bad, err)
		}
		for _, name := range names {
			ms, err := a.readManifest(name)
			if err != nil {
				bad = append(bad, err)
			}
			out = append(out, ms...)
		}
	}
	if len(bad) == 1 {
		return nil, bad[0]
	}
	if len(bad) > 1 { // all of them, so that one look is enough
		return nil, fmt.Errorf("%w\n(nothing was changed: %d files cannot be used)", errors.Join(bad...), len(bad))
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
	if strings.HasPrefix(f, "https://") || strings.HasPrefix(f, "http://") {
		return nil, usagef("%s: addresses are not read, so that what runs is what was looked at; for this one: curl -fsSL %s | dunlin apply -f -", f, f)
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
			namespace: acc.GetNamespace(), name: acc.GetName(), json: d.JSON, object: d.Object, place: d.LineOf, file: name,
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
	if o.dryRun == dryRunClient {
		return a.applyHere(ctx, docs, o)
	}
	c, err := a.client()
	if err != nil {
		return err
	}
	all, err := c.Resources(ctx)
	if err != nil {
		return err
	}
	if err := a.checkAll(ctx, c, all, docs, o); err != nil {
		return err
	}
	each := a.each("applied", len(docs))
	for i, d := range docs {
		if err := each.note(ctx, i, a.applyOne(ctx, c, all, d, o)); err != nil {
			return err
		}
	}
	return each.done()
}

// checkAll lets the server look at all objects before any is changed. Only what
// will never do (invalid, not to be read) keeps the others from being applied:
// an object may need one that comes before it, a namespace for instance.
func (a *app) checkAll(ctx context.Context, c *client.Client, all []client.Resource, docs []manifest, o applyOptions) error {
	bad := sameNodePorts(docs, c.Namespace)
	dry := o.dryRun == dryRunServer
	if dry && len(bad) == 0 || len(docs) < 2 {
		return nil
	}
	for _, d := range docs {
		r, err := client.ByKind(all, d.gvk)
		if err != nil {
			continue // said when its turn comes
		}
		if d.name == "" {
			bad = append(bad, fmt.Errorf("%s: %w", d.source, errNoName))
			continue
		}
		o.dryRun = dryRunServer
		err = send(ctx, c, r.Path(d.namespaceOr(c.Namespace), d.name), d.json, o, &map[string]any{})
		if client.IsNotFound(err) {
			err = d.check(c.Namespace) // its namespace is still to be made, so it is new
		}
		if errors.Is(err, errInvalid) || client.IsInvalid(err) && (dry || !isTaken(err)) {
			bad = append(bad, d.refused(err))
		}
	}
	switch len(bad) {
	case 0:
		return nil
	case 1:
		return fmt.Errorf("%w\n(nothing was changed: one of %d objects is invalid)", bad[0], len(docs))
	}
	for _, err := range bad {
		a.notef("Error: %v\n", err)
	}
	return fmt.Errorf("%d of %d objects are invalid, nothing was changed; the reasons stand above", len(bad), len(docs))
}

var (
	// errInvalid is what check finds.
	errInvalid = errors.New("is invalid")
	errNoName  = errors.New("metadata.name is missing (apply needs a name)")
)

// check judges an object as the server would that has its namespace.
func (m manifest) check(namespace string) error {
	obj := m.object.DeepCopyObject()
	acc, err := meta.Accessor(obj)
	if err != nil {
		return err
	}
	if acc.GetNamespace() == "" {
		acc.SetNamespace(namespace)
	}
	manifests.Default(obj)
	if errs := manifests.Validate(obj); len(errs) > 0 {
		return &invalidError{errs, fmt.Errorf("%s %q %w: %w", m.gvk.Kind, m.name, errInvalid, errs.ToAggregate())}
	}
	return nil
}

// send applies one object.
func send(ctx context.Context, c *client.Client, path string, body []byte, o applyOptions, into *map[string]any) error {
	q := url.Values{"fieldManager": {"dunlin"}, "fieldValidation": {"Strict"}, "force": {strconv.FormatBool(o.force)}}
	if o.dryRun == dryRunServer {
		q.Set("dryRun", "All")
	}
	return c.JSON(ctx, client.Request{Method: http.MethodPatch, Path: path, Query: q, ContentType: "application/apply-patch+yaml", Body: body}, into)
}

func (a *app) applyOne(ctx context.Context, c *client.Client, all []client.Resource, d manifest, o applyOptions) error {
	err := a.applyTo(ctx, c, all, d, o)
	if err != nil {
		return d.refused(err)
	}
	return nil
}

// invalidError is what check finds, field by field.
type invalidError struct {
	list field.ErrorList
	error
}

// Unwrap implements the interface of package errors.
func (e *invalidError) Unwrap() error { return e.error }

// mergedField finds the field in what structured-merge-diff says, as
// ".spec.template.spec.containers: duplicate entries for key".
var mergedField = regexp.MustCompile(`: \.([^\s:]+): `)

// refused puts the place in front of a refusal: the line of the first field
// that it is about, if it is about fields, else where the object begins; where
// it is about several, the lines of all follow.
func (m manifest) refused(err error) error {
	var fields []string
	var se *client.StatusError
	var local *invalidError
	switch {
	case errors.As(err, &local):
		for _, e := range local.list {
			fields = append(fields, e.Field)
		}
	case errors.As(err, &se) && se.Status.Details != nil && len(se.Status.Details.Causes) > 0:
		for _, c := range se.Status.Details.Causes {
			fields = append(fields, c.Field)
		}
	case se != nil: // of a merge that fails no causes are told
		if at := mergedField.FindStringSubmatch(se.Status.Message); at != nil {
			fields = append(fields, at[1])
		}
	}
	source, more := m.source, ""
	var lines []int
	for _, f := range fields {
		line := 0
		if m.place != nil {
			line = m.place(f)
		}
		if line == 0 || slices.Contains(lines, line) {
			continue
		}
		if lines = append(lines, line); len(lines) == 1 {
			source = fmt.Sprintf("%s:%d", m.file, line)
			continue
		}
		more += fmt.Sprintf("\n(%s: %s:%d)", f, m.file, line)
	}
	return fmt.Errorf("%s: %w%s", source, err, more)
}

func (a *app) applyTo(ctx context.Context, c *client.Client, all []client.Resource, d manifest, o applyOptions) error {
	r, err := client.ByKind(all, d.gvk)
	if err != nil {
		return err
	}
	if d.name == "" {
		return errNoName
	}
	path := r.Path(d.namespaceOr(c.Namespace), d.name)
	before, err := c.Object(ctx, path)
	if err != nil && !client.IsNotFound(err) {
		return err
	}
	after := &unstructured.Unstructured{}
	err = send(ctx, c, path, d.json, o, &after.Object)
	if client.IsConflict(err) && ownConflict(err) {
		o.force = true // what 'dunlin scale' changed, the file may change back
		err = send(ctx, c, path, d.json, o, &after.Object)
	}
	if client.IsConflict(err) {
		return fmt.Errorf("%w\n(%s)", err, conflictHint(err))
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
	if o.dryRun == dryRunServer {
		verb += " (dry run)"
	}
	a.printf("%s/%s %s\n", r, d.name, verb)
	return nil
}

// conflictHint is what to do about a conflict: of fields, or of an object that
// is not the one that the file was read from.
func conflictHint(err error) string {
	var se *client.StatusError
	if errors.As(err, &se) && se.Status.Details != nil && slices.ContainsFunc(se.Status.Details.Causes, func(c metav1.StatusCause) bool { return c.Type == metav1.CauseTypeFieldManagerConflict }) {
		return "another manager owns these fields; --force-conflicts takes them over"
	}
	return "the file names a metadata.uid or metadata.resourceVersion that the object does not have; leave them out"
}

// ownConflict says whether all fields of a conflict were last written by other
// commands of dunlin's.
func ownConflict(err error) bool {
	var se *client.StatusError
	if !errors.As(err, &se) || se.Status.Details == nil || len(se.Status.Details.Causes) == 0 {
		return false
	}
	for _, c := range se.Status.Details.Causes {
		if c.Type != metav1.CauseTypeFieldManagerConflict || !strings.HasPrefix(c.Message, `conflict with "dunlin"`) {
			return false
		}
	}
	return true
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
