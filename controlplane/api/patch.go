package api

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"

	jsonpatch "gopkg.in/evanphx/json-patch.v4"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	metav1validation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer/cbor/direct"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/mergepatch"
	"k8s.io/apimachinery/pkg/util/strategicpatch"
	"k8s.io/apimachinery/pkg/util/validation/field"
	kjson "sigs.k8s.io/json"
	"sigs.k8s.io/yaml"

	"github.com/dunlin-project/dunlin/controlplane/registry"
)

// patchTypes in upstream's order.
var patchTypes = []types.PatchType{
	types.JSONPatchType, types.MergePatchType, types.StrategicMergePatchType, types.ApplyYAMLPatchType, types.ApplyCBORPatchType,
}

// maxPatchOps bounds a JSON patch: upstream's figure.
const maxPatchOps = 10_000

// The library's own bound on what the copy operations of a JSON patch add:
// without it a few of them double a document until memory ends.
func init() { jsonpatch.AccumulatedCopySizeLimit = MaxBody }

// patch is one PATCH request.
type patch struct {
	s    *Server
	rq   *request
	sub  registry.Subresource
	typ  types.PatchType
	body []byte
	opts metav1.PatchOptions
	mgr  string
}

// patch answers PATCH on an object, its status, scale, finalize or
// ephemeralcontainers.
func (s *Server) patch(rq *request, sub registry.Subresource) error {
	at, err := s.codecs.negotiate(rq.Request, true, false)
	if err != nil {
		return err
	}
	p, err := s.parsePatch(rq, sub)
	if err != nil {
		return err
	}
	var out runtime.Object
	code := http.StatusOK
	switch p.typ {
	case types.ApplyYAMLPatchType, types.ApplyCBORPatchType:
		out, code, err = p.apply()
	default:
		out, err = s.cfg.Registry.Update(rq.Context(), rq.kind.GroupKind(), rq.info.namespace, rq.info.name, sub, p.mutate, rq.writeOptions(p.mgr, p.opts.DryRun))
	}
	if err != nil {
		return err
	}
	return s.answer(rq, at, code, out)
}

func (s *Server) parsePatch(rq *request, sub registry.Subresource) (*patch, error) {
	p := &patch{s: s, rq: rq, sub: sub}
	ct := contentType(rq.Request)
	for _, t := range patchTypes {
		if ct == string(t) {
			p.typ = t
		}
	}
	if p.typ == "" {
		var names []string
		for _, t := range patchTypes {
			names = append(names, string(t))
		}
		return nil, unsupportedMedia(strings.Join(names, ", "))
	}
	var err error
	p.opts, err = options(rq, "PatchOptions", metav1.Convert_url_Values_To_v1_PatchOptions, func(o *metav1.PatchOptions) field.ErrorList {
		return metav1validation.ValidatePatchOptions(o, p.typ)
	})
	if err != nil {
		return nil, err
	}
	p.mgr = manager(rq.Request, p.opts.FieldManager)
	if p.body, err = s.readBody(rq); err != nil {
		return nil, err
	}
	return p, nil
}

// gvk is what the patched document is: the kind, or its Scale.
func (p *patch) gvk() schema.GroupVersionKind {
	gvk, _ := bodyOf(p.rq.kind, p.sub)
	return gvk
}

func (p *patch) empty() runtime.Object {
	_, obj := bodyOf(p.rq.kind, p.sub)
	return obj
}

// mutate is the registry's Mutate: the current object in, the patched out.
func (p *patch) mutate(cur runtime.Object) (runtime.Object, error) {
	curJSON, err := p.s.encodeJSON(cur)
	if err != nil {
		return nil, apierrors.NewInternalError(err)
	}
	patched, err := p.patchJSON(curJSON)
	if err != nil {
		return nil, err
	}
	obj, err := p.decode(patched)
	if err != nil {
		return nil, err
	}
	return p.s.ownUpdated(p.rq.kind, p.sub, cur, obj, p.mgr)
}

func (s *Server) encodeJSON(obj runtime.Object) ([]byte, error) {
	var b bytes.Buffer
	if err := s.codecs.infos[0].Serializer.Encode(obj, &b); err != nil {
		return nil, err
	}
	return b.Bytes(), nil
}

func (p *patch) patchJSON(cur []byte) ([]byte, error) {
	switch p.typ {
	case types.JSONPatchType:
		ops, err := jsonpatch.DecodePatch(p.body)
		if err != nil {
			return nil, apierrors.NewBadRequest(err.Error())
		}
		if len(ops) > maxPatchOps {
			return nil, apierrors.NewRequestEntityTooLargeError(fmt.Sprintf("The allowed maximum operations in a JSON patch is %d, got %d", maxPatchOps, len(ops)))
		}
		out, err := ops.Apply(cur)
		if err != nil {
			return nil, apierrors.NewGenericServerResponse(http.StatusUnprocessableEntity, "", schema.GroupResource{}, "", err.Error(), 0, false)
		}
		return out, nil
	case types.MergePatchType:
		if err := p.checkDuplicates(); err != nil {
			return nil, err
		}
		out, err := jsonpatch.MergePatch(cur, p.body)
		if err != nil {
			return nil, apierrors.NewBadRequest(err.Error())
		}
		return out, nil
	default:
		if err := p.checkDuplicates(); err != nil {
			return nil, err
		}
		out, err := strategicpatch.StrategicMergePatch(cur, p.body, p.empty())
		switch {
		case err == nil:
			return out, nil
		case errors.Is(err, mergepatch.ErrBadJSONDoc), errors.Is(err, mergepatch.ErrBadPatchFormatForPrimitiveList),
			errors.Is(err, mergepatch.ErrBadPatchFormatForRetainKeys), errors.Is(err, mergepatch.ErrBadPatchFormatForSetElementOrderList),
			errors.Is(err, mergepatch.ErrUnsupportedStrategicMergePatchFormat):
			return nil, apierrors.NewBadRequest(err.Error())
		case errors.Is(err, mergepatch.ErrNoListOfLists), mergepatch.IsConflict(err), mergepatch.IsPreconditionFailed(err):
			return nil, apierrors.NewGenericServerResponse(http.StatusUnprocessableEntity, "", schema.GroupResource{}, "", err.Error(), 0, false)
		}
		return nil, apierrors.NewBadRequest(err.Error())
	}
}

// checkDuplicates reports keys that stand twice in the patch itself, as
// fieldValidation wants it.
func (p *patch) checkDuplicates() error {
	if p.opts.FieldValidation == metav1.FieldValidationIgnore {
		return nil
	}
	var into map[string]any
	strict, err := kjson.UnmarshalStrict(p.body, &into)
	if err != nil {
		return apierrors.NewBadRequest(fmt.Sprintf("error decoding patch: %v", err))
	}
	return p.strict(strict)
}

// strict answers strict-decoding errors as fieldValidation says.
func (p *patch) strict(errs []error) error {
	if len(errs) == 0 {
		return nil
	}
	if p.opts.FieldValidation == metav1.FieldValidationStrict {
		return apierrors.NewInvalid(schema.GroupKind{}, "", field.ErrorList{
			field.Invalid(field.NewPath("patch"), string(p.body), runtime.NewStrictDecodingError(errs).Error()),
		})
	}
	for _, e := range errs {
		p.rq.warn(e.Error())
	}
	return nil
}

// decode reads the patched document back.
func (p *patch) decode(doc []byte) (runtime.Object, error) {
	gvk, info := p.gvk(), p.s.codecs.infos[0]
	ser := info.StrictSerializer
	if p.opts.FieldValidation == metav1.FieldValidationIgnore {
		ser = info.Serializer
	}
	obj, got, err := ser.Decode(doc, &gvk, p.empty())
	if err != nil {
		strict, isStrict := runtime.AsStrictDecodingError(err)
		if !isStrict || obj == nil {
			return nil, apierrors.NewInvalid(schema.GroupKind{}, "", field.ErrorList{
				field.Invalid(field.NewPath("patch"), string(doc), err.Error()),
			})
		}
		if err := p.strict(strict.Errors()); err != nil {
			return nil, err
		}
	}
	if got != nil && *got != gvk {
		return nil, wrongKind(*got, gvk)
	}
	return obj, nil
}

// apply is server-side apply: it creates what does not exist.
func (p *patch) apply() (runtime.Object, int, error) {
	rq, s := p.rq, p.s
	intent, err := p.intent()
	if err != nil {
		return nil, 0, err
	}
	if err := checkEntries(p.gvk().GroupKind(), intent); err != nil {
		return nil, 0, err
	}
	fm, err := s.managers.get(p.gvk(), string(p.sub))
	if err != nil {
		return nil, 0, err
	}
	if fm == nil {
		return nil, 0, apierrors.NewBadRequest(errNoManager.Error())
	}
	force := p.opts.Force != nil && *p.opts.Force
	opts := rq.writeOptions(p.mgr, p.opts.DryRun)
	merge := func(live runtime.Object) (runtime.Object, error) {
		if p.sub == registry.Scale {
			return s.applyScale(rq.kind, fm, live, intent.DeepCopy(), p.mgr, force)
		}
		out, err := fm.Apply(live, intent.DeepCopy(), p.mgr, force)
		if err != nil {
			return nil, applyError(err)
		}
		return out, checkEntries(rq.kind.GroupKind(), out) // no patch too many of a list that grows
	}
	const attempts = 8
	for range attempts {
		out, err := s.cfg.Registry.Update(rq.Context(), rq.kind.GroupKind(), rq.info.namespace, rq.info.name, p.sub, merge, opts)
		if !apierrors.IsNotFound(err) || p.sub != registry.Main {
			return out, http.StatusOK, err
		}
		if intent.GetUID() != "" {
			return nil, 0, apierrors.NewConflict(rq.info.gvr.GroupResource(), rq.info.name,
				fmt.Errorf("uid mismatch: the provided object specified uid %s, and no existing object was found", intent.GetUID()))
		}
		live := rq.kind.New()
		live.GetObjectKind().SetGroupVersionKind(rq.kind.GVK)
		obj, err := merge(live)
		if err != nil {
			return nil, 0, err
		}
		m, err := accessor(obj)
		if err != nil {
			return nil, 0, err
		}
		m.SetName(rq.info.name)
		m.SetResourceVersion("")
		if err := setNamespace(rq, m); err != nil {
			return nil, 0, err
		}
		out, err = s.cfg.Registry.Create(rq.Context(), obj, opts)
		if !apierrors.IsAlreadyExists(err) {
			return out, http.StatusCreated, err
		}
	}
	return nil, 0, apierrors.NewConflict(rq.info.gvr.GroupResource(), rq.info.name, errors.New("the object is created and deleted all the time"))
}

// applyError keeps the field manager's Kubernetes errors and says that
// everything else is the patch's fault.
func applyError(err error) error {
	var st apierrors.APIStatus
	if errors.As(err, &st) {
		return err
	}
	return apierrors.NewBadRequest(err.Error())
}

// intent reads the applied configuration.
func (p *patch) intent() (*unstructured.Unstructured, error) {
	content := map[string]any{}
	switch p.typ {
	case types.ApplyCBORPatchType:
		if err := direct.Unmarshal(p.body, &content); err != nil {
			return nil, apierrors.NewBadRequest(fmt.Sprintf("error decoding CBOR: %v", err))
		}
	default:
		doc, err := yaml.YAMLToJSONStrict(p.body)
		if err != nil {
			var lax error
			if doc, lax = yaml.YAMLToJSON(p.body); lax != nil {
				return nil, apierrors.NewBadRequest(fmt.Sprintf("error decoding YAML: %v", lax))
			}
			if err := p.strictApply([]error{err}); err != nil {
				return nil, err
			}
		}
		if err := kjson.UnmarshalCaseSensitivePreserveInts(doc, &content); err != nil {
			return nil, apierrors.NewBadRequest(fmt.Sprintf("error decoding YAML: %v", err))
		}
	}
	u := &unstructured.Unstructured{Object: content}
	want := p.gvk()
	got := u.GroupVersionKind()
	if got.Kind == "" || got.Version == "" {
		return nil, apierrors.NewBadRequest("the applied configuration must have apiVersion and kind")
	}
	if got != want {
		return nil, wrongKind(got, want)
	}
	if n := u.GetName(); n != "" && n != p.rq.info.name {
		return nil, apierrors.NewBadRequest(fmt.Sprintf("the name of the object (%s) does not match the name on the URL (%s)", n, p.rq.info.name))
	}
	if p.opts.FieldValidation != metav1.FieldValidationIgnore {
		doc, err := json.Marshal(content)
		if err != nil {
			return nil, apierrors.NewBadRequest(err.Error())
		}
		if _, _, err := p.s.codecs.infos[0].StrictSerializer.Decode(doc, &want, p.empty()); err != nil {
			if strict, ok := runtime.AsStrictDecodingError(err); ok {
				if err := p.strictApply(strict.Errors()); err != nil {
					return nil, err
				}
			}
		}
	}
	return u, nil
}

func (p *patch) strictApply(errs []error) error {
	if p.opts.FieldValidation == metav1.FieldValidationStrict {
		return apierrors.NewBadRequest(runtime.NewStrictDecodingError(errs).Error())
	}
	for _, e := range errs {
		p.rq.warn(e.Error())
	}
	return nil
}
