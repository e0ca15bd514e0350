package manifests

import (
	"sync"

	apidiscoveryv2 "k8s.io/api/apidiscovery/v2"
	apidiscoveryv2beta1 "k8s.io/api/apidiscovery/v2beta1"
	appsv1 "k8s.io/api/apps/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	autoscalingv1 "k8s.io/api/autoscaling/v1"
	batchv1 "k8s.io/api/batch/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	eventsv1 "k8s.io/api/events/v1"
	networkingv1 "k8s.io/api/networking/v1"
	nodev1 "k8s.io/api/node/v1"
	policyv1 "k8s.io/api/policy/v1"
	policyv1beta1 "k8s.io/api/policy/v1beta1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metav1beta1 "k8s.io/apimachinery/pkg/apis/meta/v1beta1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/runtime/serializer/cbor"
)

var scheme = sync.OnceValue(func() *runtime.Scheme {
	s := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{
		corev1.AddToScheme,
		appsv1.AddToScheme,
		autoscalingv1.AddToScheme,
		batchv1.AddToScheme,
		authenticationv1.AddToScheme,
		authorizationv1.AddToScheme,
		coordinationv1.AddToScheme,
		discoveryv1.AddToScheme,
		eventsv1.AddToScheme,
		networkingv1.AddToScheme,
		nodev1.AddToScheme,
		policyv1.AddToScheme,
		policyv1beta1.AddToScheme,
		schedulingv1.AddToScheme,
		storagev1.AddToScheme,
		apidiscoveryv2.AddToScheme,
		apidiscoveryv2beta1.AddToScheme,
		metav1.AddMetaToScheme,
		metav1beta1.AddMetaToScheme,
	} {
		must(add(s))
	}
	// Option types in meta.k8s.io/v1 too, and the unversioned types (Status,
	// APIGroup, ...) in v1: bodies and queries of either spelling decode.
	metav1.AddToGroupVersion(s, metav1.SchemeGroupVersion)
	metav1.AddToGroupVersion(s, schema.GroupVersion{Version: "v1"})
	addQueryConversions(s)
	return s
})

func must(err error) {
	if err != nil {
		panic("manifests: scheme: " + err.Error()) // a type registered twice: cannot happen at run time
	}
}

// Scheme knows every type of the served groups, the review, eviction, scale
// and discovery types, and the meta types with the conversions from URL
// queries to option types. It has no internal versions and no defaulting
// functions (see Default). It is built on first use and must not be changed.
func Scheme() *runtime.Scheme { return scheme() }

var codecs = sync.OnceValue(func() serializer.CodecFactory {
	return serializer.NewCodecFactory(Scheme(),
		serializer.WithSerializer(cbor.NewSerializerInfo),
		serializer.WithStreamingCollectionEncodingToJSON(),
		serializer.WithStreamingCollectionEncodingToProtobuf(),
	)
})

// Codecs serves JSON, YAML, protobuf and CBOR over Scheme. Lists are encoded
// item by item in JSON and protobuf. Built on first use.
func Codecs() serializer.CodecFactory { return codecs() }

var parameterCodec = sync.OnceValue(func() runtime.ParameterCodec {
	return runtime.NewParameterCodec(Scheme())
})

// ParameterCodec turns URL queries into option types (ListOptions,
// PatchOptions, PodLogOptions, ...) of any served group version.
func ParameterCodec() runtime.ParameterCodec { return parameterCodec() }
