package api

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"net/url"
	"strings"
	"unicode"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metav1validation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/conversion"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/manifests"
)

// readBody reads the body and refuses numbers that no decoder may be given
// (see manifests.CheckNumbers).
func (s *Server) readBody(rq *request) ([]byte, error) {
	body, err := s.rawBytes(rq)
	if err != nil {
		return nil, err
	}
	if err := manifests.CheckNumbers(body, rq.kind); err != nil {
		return nil, apierrors.NewBadRequest(err.Error())
	}
	return body, nil
}

// largeBody is the size from which a body counts as large, bytes.
const largeBody = 256 << 10

// rawBytes reads the body. A large one needs a slot of its own, kept until
// the request ends: what is made of it takes many times its size in memory,
// so only a few are worked on at the same time.
func (s *Server) rawBytes(rq *request) ([]byte, error) {
	var b bytes.Buffer
	_, err := io.CopyN(&b, rq.Body, largeBody)
	switch {
	case errors.Is(err, io.EOF):
		return b.Bytes(), nil
	case err != nil:
		return nil, err
	}
	if rq.release, err = s.limiter.large.acquire(rq.Context(), rq.identity); err != nil {
		s.metrics.rejected.WithLabelValues("large").Inc()
		return nil, apierrors.NewTooManyRequests("too many large requests are running; please try again later", 1)
	}
	if _, err := b.ReadFrom(rq.Body); err != nil {
		return nil, err
	}
	return b.Bytes(), nil
}

// decodeBody reads a typed object from the body. directive is
// fieldValidation: Strict, Warn (also "") or Ignore.
func (s *Server) decodeBody(rq *request, gvk schema.GroupVersionKind, into runtime.Object, directive string) (runtime.Object, error) {
	info, err := s.codecs.input(rq.Request)
	if err != nil {
		return nil, err
	}
	body, err := s.readBody(rq)
	if err != nil {
		return nil, err
	}
	if len(body) == 0 {
		return nil, apierrors.NewBadRequest("the body of the request is empty")
	}
	ser := info.StrictSerializer
	if directive == metav1.FieldValidationIgnore || ser == nil {
		ser = info.Serializer
	}
	obj, got, err := ser.Decode(body, &gvk, into)
	if err != nil {
		strict, isStrict := runtime.AsStrictDecodingError(err)
		switch {
		case isStrict && obj != nil && directive != metav1.FieldValidationStrict:
			for _, e := range strict.Errors() {
				rq.warn(e.Error())
			}
		default:
			return nil, decodeError(err, gvk, got, body)
		}
	}
	if got != nil && *got != gvk {
		return nil, wrongKind(*got, gvk)
	}
	obj.GetObjectKind().SetGroupVersionKind(gvk)
	return obj, nil
}

func decodeError(err error, want schema.GroupVersionKind, got *schema.GroupVersionKind, body []byte) error {
	if got != nil && got.Kind != "" {
		return apierrors.NewBadRequest(fmt.Sprintf("%s in version %q cannot be handled as a %s: %v", got.Kind, got.Version, want.Kind, err))
	}
	const most = 30
	summary := fmt.Sprintf("%q", body[:min(len(body), most)])
	if len(body) > most {
		summary += " ..."
	}
	return apierrors.NewBadRequest(fmt.Sprintf("the object provided is unrecognized (must be of type %s): %v (%s)", want.Kind, err, summary))
}

func wrongKind(got, want schema.GroupVersionKind) error {
	if got.GroupVersion() != want.GroupVersion() {
		return apierrors.NewBadRequest(fmt.Sprintf("the API version in the data (%s) does not match the expected API version (%s)",
			got.GroupVersion(), want.GroupVersion()))
	}
	return apierrors.NewBadRequest(fmt.Sprintf("%s in version %q cannot be handled as a %s", got.Kind, got.Version, want.Kind))
}

// setNamespace makes body and address agree on the namespace.
func setNamespace(rq *request, m metav1.Object) error {
	switch ns := m.GetNamespace(); {
	case !rq.kind.Namespaced:
		m.SetNamespace("")
	case ns == "":
		m.SetNamespace(rq.info.namespace)
	case ns != rq.info.namespace:
		return apierrors.NewBadRequest("the namespace of the provided object does not match the namespace sent on the request")
	}
	return nil
}

// manager is the field manager of a write: the parameter, or the program
// that the User-Agent names.
func manager(r *http.Request, param string) string {
	if param != "" {
		return param
	}
	name, _, _ := strings.Cut(r.UserAgent(), "/")
	var b strings.Builder
	for _, c := range name {
		if unicode.IsPrint(c) && b.Len()+len(string(c)) <= metav1validation.FieldManagerMaxLength {
			b.WriteRune(c)
		}
	}
	return b.String()
}

// checkEntries refuses an object with a map or list that is too long.
func checkEntries(gk schema.GroupKind, obj runtime.Object) error {
	err := manifests.CheckEntries(obj)
	var many *manifests.TooManyEntriesError
	if !errors.As(err, &many) {
		return err
	}
	name := ""
	if m, err := meta.Accessor(obj); err == nil {
		name = m.GetName()
	}
	return apierrors.NewInvalid(gk, name, field.ErrorList{field.Forbidden(field.NewPath(many.Path), "too many entries, "+many.Limit())})
}

func invalidOptions(kind string, errs field.ErrorList) error {
	if len(errs) == 0 {
		return nil
	}
	return apierrors.NewInvalid(schema.GroupKind{Group: metav1.GroupName, Kind: kind}, "", errs)
}

// options reads a write's options from the query: convert and validate are
// upstream's for kind.
func options[O any](rq *request, kind string, convert func(*url.Values, *O, conversion.Scope) error, validate func(*O) field.ErrorList) (O, error) {
	q := rq.URL.Query()
	var o O
	if err := convert(&q, &o, nil); err != nil {
		return o, apierrors.NewBadRequest(err.Error())
	}
	return o, invalidOptions(kind, validate(&o))
}

func createOptions(rq *request) (metav1.CreateOptions, error) {
	return options(rq, "CreateOptions", metav1.Convert_url_Values_To_v1_CreateOptions, metav1validation.ValidateCreateOptions)
}

func updateOptions(rq *request) (metav1.UpdateOptions, error) {
	return options(rq, "UpdateOptions", metav1.Convert_url_Values_To_v1_UpdateOptions, metav1validation.ValidateUpdateOptions)
}

// decodeObject reads the body of a write whose namespace must be that of the
// address.
func (s *Server) decodeObject(rq *request, gvk schema.GroupVersionKind, into runtime.Object, directive string) (runtime.Object, metav1.Object, error) {
	obj, err := s.decodeBody(rq, gvk, into, directive)
	if err != nil {
		return nil, nil, err
	}
	m, err := accessor(obj)
	if err != nil {
		return nil, nil, err
	}
	return obj, m, setNamespace(rq, m)
}

func (rq *request) writeOptions(manager string, dryRun []string) registry.WriteOptions {
	return registry.WriteOptions{FieldManager: manager, DryRun: len(dryRun) > 0, Warn: rq.warn, User: rq.user.Name}
}

// deleteOptions reads them from the body, whatever its form, or from the
// query if there is none.
func (s *Server) deleteOptions(rq *request) (metav1.DeleteOptions, error) {
	var o metav1.DeleteOptions
	body, err := s.rawBytes(rq)
	if err != nil {
		return o, err
	}
	if len(body) > 0 {
		if err := s.decodeDeleteOptions(rq, body, &o); err != nil {
			return o, err
		}
		return o, invalidOptions("DeleteOptions", metav1validation.ValidateDeleteOptions(&o))
	}
	return options(rq, "DeleteOptions", metav1.Convert_url_Values_To_v1_DeleteOptions, metav1validation.ValidateDeleteOptions)
}

func (s *Server) decodeDeleteOptions(rq *request, body []byte, o *metav1.DeleteOptions) error {
	info, err := s.codecs.input(rq.Request)
	if err != nil {
		return err
	}
	gvk := metav1.SchemeGroupVersion.WithKind("DeleteOptions")
	obj, got, err := info.Serializer.Decode(body, &gvk, nil)
	if d, ok := obj.(*metav1.DeleteOptions); ok && err == nil {
		*o = *d
		return nil
	}
	// Options in the name of a group that we do not serve are as good.
	if info.MediaType == runtime.ContentTypeJSON && (got == nil || got.Kind == "DeleteOptions" || got.Kind == "") {
		if jerr := json.Unmarshal(body, o); jerr == nil {
			return nil
		}
	}
	if err == nil {
		err = fmt.Errorf("decoded object cannot be converted to DeleteOptions")
	}
	return decodeError(err, gvk, got, body)
}

func toRegistryDelete(rq *request, o *metav1.DeleteOptions) registry.DeleteOptions {
	out := registry.DeleteOptions{GracePeriodSeconds: o.GracePeriodSeconds, DryRun: len(o.DryRun) > 0, Warn: rq.warn, User: rq.user.Name}
	if o.Preconditions != nil {
		out.UID, out.ResourceVersion = o.Preconditions.UID, o.Preconditions.ResourceVersion
	}
	switch {
	case o.PropagationPolicy != nil:
		out.Propagation = *o.PropagationPolicy
	case o.OrphanDependents != nil && *o.OrphanDependents:
		out.Propagation = metav1.DeletePropagationOrphan
	case o.OrphanDependents != nil:
		out.Propagation = metav1.DeletePropagationBackground
	}
	return out
}

func contentType(r *http.Request) string {
	mt, _, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	if err != nil {
		return ""
	}
	return mt
}

func accessor(obj runtime.Object) (metav1.Object, error) {
	m, err := meta.Accessor(obj)
	if err != nil {
		return nil, apierrors.NewInternalError(err)
	}
	return m, nil
}
